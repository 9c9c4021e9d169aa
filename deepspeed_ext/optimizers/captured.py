"""Under which names masters, and what inner optimizers keep for them, are captured."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_ext.optimizers.view import Master
from megatron_ft.trainer import inner_optimizer
from megatron_ft.trainer.master_tensors import MasterTensors, Owned

_MASTER, _SEPARATOR = "master", "/"


def tensors_of(masters: Iterable[Master]) -> MasterTensors:
    """The tensors of all of them, looked at when they are asked for."""
    owned = (Owned(master.name, master.inner, master.parameter) for master in masters)
    return MasterTensors(owned, _SEPARATOR, _MASTER)


def names_of(master: Master) -> list[str]:
    """The names of one master's tensors, as of now."""
    kept = inner_optimizer.state_tensors(master.inner, master.parameter)
    return [f"{master.name}{_SEPARATOR}{name}" for name in (_MASTER, *kept)]
