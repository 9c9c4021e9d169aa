"""Holds one rank inside a training step of the job's first incarnation, until the test kills it.

So a fault strikes in that very iteration, however fast training is.  No rank begins before
it may take its first snapshot, or training could stand there with nothing in memory.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from typing import Any

from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.startup import DEEPSPEED, LOOP
from megatron_ft.core.startup.sitecustomize import after_import, run_hidden

RANK, ITERATION = "1", 11
PERMIT_SECONDS = 100.0


def hold_megatron() -> None:
    from megatron.training import get_args, training

    step, finalize, iterations = training.train_step, training.maybe_finalize_async_save, count()

    def held(*args: Any, **kwargs: Any) -> Any:
        from megatron_ft.megatron import hooks

        hold(get_args().curr_iteration, getattr(hooks._current, "_manager", None))
        return step(*args, **kwargs)

    def held_before_it(*args: Any, **kwargs: Any) -> Any:
        """Ranks finish a checkpoint together, between two iterations, if they save in background.

        So none can be finished that the last iteration has begun.
        """
        from megatron_ft.megatron import hooks

        if get_args().async_save and not kwargs.get("blocking"):
            hold(next(iterations), getattr(hooks._current, "_manager", None))
        return finalize(*args, **kwargs)

    training.train_step, training.maybe_finalize_async_save = held, held_before_it


def hold_deepspeed() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    step = DeepSpeedEngine.step

    def held(engine: Any, *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.hooks import run_of

        run: Any = run_of(engine)
        hold(engine.global_steps, run._snapshots.manager)
        return step(engine, *args, **kwargs)

    DeepSpeedEngine.step = held


def hold(finished: int, manager: Any) -> None:
    if finished == 0:
        await_permit(manager._captures._arena.engine.arena)
    if finished + 1 == ITERATION and os.environ["RANK"] == RANK:
        signal.pause()


def await_permit(arena: Any) -> None:
    """The permit is a word in shared memory, which can only be looked at."""
    deadline = time.monotonic() + PERMIT_SECONDS
    while arena.permit() is None:
        assert time.monotonic() < deadline, "the coordinator has permitted no snapshot"
        time.sleep(0.01)


if __name__ == "sitecustomize":
    if "RANK" in os.environ and os.environ.get(INCARNATION) == "1":
        after_import(LOOP, hold_megatron)
        after_import(DEEPSPEED, hold_deepspeed)
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
