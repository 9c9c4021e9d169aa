"""Holds one rank inside a training step of the job's first life, until the test kills it.

So a fault strikes in that very iteration, however fast training is.  No rank begins before
it may take its first snapshot, or training could stand there with nothing in memory.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from megatron_ft.environment import INCARNATION
from megatron_ft.launch.startup.sitecustomize import LOOP, AfterImport, run_hidden

RANK, ITERATION = "1", 11
PERMIT_SECONDS = 100.0


def hold() -> None:
    from megatron.training import get_args, training

    step = training.train_step

    def held(*args: Any, **kwargs: Any) -> Any:
        if get_args().curr_iteration == 0:
            await_permit()
        if get_args().curr_iteration + 1 == ITERATION and os.environ["RANK"] == RANK:
            signal.pause()
        return step(*args, **kwargs)

    training.train_step = held


def await_permit() -> None:
    """The permit is a word in shared memory, which can only be looked at."""
    from megatron_ft.megatron import hooks

    arena = hooks._current._manager._engine.arena  # type: ignore[union-attr]
    deadline = time.monotonic() + PERMIT_SECONDS
    while arena.permit() is None:
        assert time.monotonic() < deadline, "the coordinator has permitted no snapshot"
        time.sleep(0.01)


if __name__ == "sitecustomize":
    if "RANK" in os.environ and os.environ.get(INCARNATION) == "1":
        AfterImport(LOOP, hold).install()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
