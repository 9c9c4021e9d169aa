"""DeepSpeed's optimizers behind one interface; view.py defines it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.unsharded import FusedView, PlainView, UnfusedView
from deepspeed_ext.optimizers.view import OptimizerView
from deepspeed_ext.optimizers.zero import Bf16View, Zero3View, Zero12View
from megatron_ft.core.errors import ConfigError

FAMILIES: Mapping[str, Callable[[Any], OptimizerView]] = {
    "DeepSpeedZeroOptimizer": Zero12View,
    "DeepSpeedZeroOptimizer_Stage3": Zero3View,
    "BF16_Optimizer": Bf16View,
    "FP16_Optimizer": FusedView,
    "FP16_UnfusedOptimizer": UnfusedView,
}
"""Views by the exact name of the wrapper's class: subclasses keep more than parents."""


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
