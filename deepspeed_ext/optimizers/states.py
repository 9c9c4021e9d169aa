"""How the states of DeepSpeed's own optimizers begin.

After ``step`` of each class in deepspeed/ops (0.19.8): they create their state when it is
empty, and keep it as it is when it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.view import Master
from megatron_ft.trainer import inner_optimizer
from megatron_ft.trainer.inner_optimizer import StateMaker


def materialise(master: Master) -> None:
    """Create the state of a master that is still empty; ConfigError for an unknown optimizer."""
    inner_optimizer.create_state(master.inner, master.group, master.parameter, MAKERS)


def _on_host(*moments: str) -> StateMaker:
    """Of the optimizers for offloaded states: fp32 by default, ``step`` a Python int."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        full = getattr(inner, "fp32_optimizer_states", True)
        dtype = torch.float32 if full else parameter.dtype
        zeros = {name: torch.zeros_like(parameter, dtype=dtype).detach() for name in moments}
        return {"step": 0, **zeros}

    return make


def _fused(*moments: str) -> StateMaker:
    """Of the fused optimizers: ``step`` goes on from the group's, if a checkpoint set one."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        zeros = {name: torch.zeros_like(parameter).detach() for name in moments}
        return {"step": group.get("step", 0), **zeros}

    return make


MAKERS: Mapping[str, StateMaker] = {
    "DeepSpeedCPUAdam": _on_host("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPULion": _on_host("exp_avg", "exp_avg_sq"),
    "FusedAdam": _fused("exp_avg", "exp_avg_sq"),
    "FusedLion": _fused("exp_avg"),
}
"""By class name."""
