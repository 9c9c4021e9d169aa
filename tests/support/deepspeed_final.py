"""The complete training state of one rank as plain values, for comparison with an oracle.

Written independently of the snapshot code on purpose: it takes every plain value and tensor
that it finds in the engine and its optimizer, so a comparison finds what a snapshot forgot.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Any

import numpy as np
import torch

_SKIP = object()

REPORTED = frozenset(("_global_grad_norm",))
"""Fields of the last step that are reported and never used again."""

INCARNATION = frozenset(
    (
        "warn_unscaled_loss",
        "opt_id",
        "param_id",
        "_partition_group_spans_model_parallel",
        "loaded_checkpoint_mp_world_size",
        "loaded_checkpoint_dp_world_size",
    )
)
"""Fields that say what this process has done, not where training stands."""


def collect(engine: Any) -> dict[str, Any]:
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    scalers = (getattr(wrapper, name, None) for name in ("loss_scaler", "loss_scale_config"))
    return {
        "engine": _fields(engine),
        "wrapper": {} if _has_experts(inner) else _fields(wrapper),
        "scaler": [_fields(scaler) for scaler in scalers if scaler is not None],
        "inner": [_states(inner, group) for group in sorted(inner.param_groups, key=_family)],
        "model": {name: _plain(p) for name, p in engine.module.named_parameters()},
        "buffers": {name: _plain(b) for name, b in engine.module.named_buffers()},
        "schedule": _plain(engine.lr_scheduler.state_dict()) if engine.lr_scheduler else None,
        "random": _random(),
    }


def _states(inner: Any, group: dict[str, Any]) -> dict[str, Any]:
    # ZeRO-3 empties the groups between steps; then all states, in the order they were made in.
    found = [inner.state[parameter] for parameter in group["params"]] or inner.state.values()
    return _plain(group) | {"states": [_plain(state) for state in found]}


def _has_experts(inner: Any) -> bool:
    """Groups of experts have no order, so whatever a wrapper numbers by group has none."""
    return any(map(_family, inner.param_groups))


def _family(group: dict[str, Any]) -> str:
    return str(group["name"]) if group.get("moe") else ""


def _fields(holder: Any) -> dict[str, Any]:
    fields = {k: _plain(v) for k, v in vars(holder).items() if k not in REPORTED | INCARNATION}
    return {name: value for name, value in fields.items() if value is not _SKIP}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return _SKIP
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, dict):
        made = {str(k): _plain(v) for k, v in value.items() if isinstance(k, int | str)}
        return {key: inner for key, inner in made.items() if inner is not _SKIP}
    if isinstance(value, list | tuple):
        return [inner for inner in map(_plain, value) if inner is not _SKIP]
    return _SKIP


def _random() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        "python": str(random.getstate()),
        "numpy": [str(part) for part in numpy_state],
        "torch": torch.get_rng_state(),
    }
