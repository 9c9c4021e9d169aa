"""Where training stands: counters on Megatron's arguments, schedule, and the rerun machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SAMPLE_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def capture_samples(args: Any) -> dict[str, int]:
    """Samples used so far; they are the position of Megatron's own data loaders."""
    return {name: getattr(args, name) for name in SAMPLE_COUNTERS}


def restore_samples(args: Any, samples: dict[str, int]) -> None:
    """Set them, and the number of micro-batches that follows, as loading a checkpoint does."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    for name in SAMPLE_COUNTERS:
        setattr(args, name, samples[name])
    update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)


def restore_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Set the learning-rate and weight-decay schedule.

    Megatron's loader advances the schedule from where it is, so it has to be at its start.
    """
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def capture_rerun_machine(data_iterator: Any) -> dict[str, Any] | None:
    """State of Megatron's rerun machine, or None where it is off."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    state: dict[str, Any] | None = get_rerun_state_machine().state_dict(data_iterator, "torch_dist")
    if state is None:
        return None
    # Wrapped for Megatron's checkpoint files; what loads it wants the plain value.
    return {**state, "sharded": getattr(state["sharded"], "data", state["sharded"])}


def restore_rerun_machine(state: dict[str, Any] | None) -> None:
    """Set what :func:`capture_rerun_machine` gave."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    if state is not None:
        with _quiet("megatron.core.rerun_state_machine"):
            get_rerun_state_machine().load_state_dict(state)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    # It announces that it will rerun a step, which is true only of its own checkpoints.
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
