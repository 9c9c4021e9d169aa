"""Where training stands: the engine's counters, batch size and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.optimizers.scalars import plain_fields, set_fields
from megatron_ft.trainer.values import host_copy

COUNTERS = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "micro_steps",
    "_step_applied",
    "_unmanaged_backward_count",
    "gas_boundary_ctr",
)
"""Attributes of the engine, the last one in older releases.

DeepSpeed's own checkpoints hold the first three.
"""

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Attributes of the configuration that ``set_train_batch_size`` and its like change on the way."""

STATEFUL = ("lr_scheduler", "random_ltd_scheduler", "torch_autocast_z0_gradscaler")
"""Attributes of the engine with ``state_dict`` and ``load_state_dict``, where they are set."""

LAYER_DROP = "progressive_layer_drop"
"""Attribute of plain values, in releases that drop layers progressively."""

CURRICULUM = "curriculum_scheduler_legacy"
"""Attribute with ``get_state`` and ``set_state``: the schedule of sequence lengths."""


def capture(engine: Any) -> dict[str, Any]:
    """All of it as plain values, as of now."""
    found = ((name, getattr(engine, name, None)) for name in STATEFUL)
    states = {name: host_copy(value.state_dict()) for name, value in found if value is not None}
    curriculum = getattr(engine, CURRICULUM, None)
    layer_drop = getattr(engine, LAYER_DROP, None)
    return {
        "counters": plain_fields(engine, COUNTERS),
        "batch": plain_fields(engine._config, BATCH),
        "schedules": states,
        "layer_drop": {} if layer_drop is None else plain_fields(layer_drop),
        "curriculum": None if curriculum is None else host_copy(curriculum.get_state()),
    }


def restore(engine: Any, captured: Mapping[str, Any]) -> None:
    """Set what :func:`capture` gave; what the engine has not any more is left out."""
    set_fields(engine, captured["counters"])
    set_fields(engine._config, captured.get("batch", {}))
    if engine.pipeline_parallelism:
        engine.micro_batches = engine.gradient_accumulation_steps()
    for name, state in captured["schedules"].items():
        schedule = getattr(engine, name, None)
        if schedule is not None:
            schedule.load_state_dict(state)
    curriculum = getattr(engine, CURRICULUM, None)
    if curriculum is not None and captured["curriculum"] is not None:
        curriculum.set_state(captured["curriculum"])
    if getattr(engine, LAYER_DROP, None) is not None:
        set_fields(getattr(engine, LAYER_DROP), captured["layer_drop"])
