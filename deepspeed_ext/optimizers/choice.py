"""Which family an engine's optimizer is of.

Under which names masters, and what inner optimizers keep for them, are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.partitioned import Bf16View, Zero3View, Zero12View
from deepspeed_ext.optimizers.unsharded import FusedView, PlainView, UnfusedView
from deepspeed_ext.optimizers.view import Master, OptimizerView
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.master_tensors import MasterTensors, Owned

_MASTER, _SEPARATOR = "master", "/"


def tensors_of(masters: Iterable[Master]) -> MasterTensors:
    """The tensors of all of them, looked at when they are asked for."""
    owned = (Owned(master.name, master.inner, master.parameter) for master in masters)
    return MasterTensors(owned, _SEPARATOR, _MASTER)


def names_of(master: Master) -> list[str]:
    """The names of one master's tensors, as of now."""
    kept = master_tensors.state_tensors(master.inner, master.parameter)
    return [f"{master.name}{_SEPARATOR}{name}" for name in (_MASTER, *kept)]


FAMILIES: Mapping[str, Callable[[Any], OptimizerView]] = {
    "DeepSpeedZeroOptimizer": Zero12View,
    "DeepSpeedZeroOptimizer_Stage3": Zero3View,
    "BF16_Optimizer": Bf16View,
    "FP16_Optimizer": FusedView,
    "FP16_UnfusedOptimizer": UnfusedView,
}
"""By the name of the wrapper's class: subclasses keep more than their parents."""


def view_of(engine: Any) -> OptimizerView:
    """The view of ``engine.optimizer``; ConfigError names an optimizer that is not known."""
    wrapper = engine.optimizer
    family = FAMILIES.get(type(wrapper).__name__)
    if family is not None:
        return family(engine)
    if isinstance(wrapper, torch.optim.Optimizer):
        return PlainView(engine)
    raise ConfigError(
        f"{type(wrapper).__name__} as engine.optimizer is not known to snapshots, which know "
        f"{', '.join(FAMILIES)} and torch's optimizers; train without inmem_snapshot"
    )
