"""Holds one rank inside a training step of the job's first life, until the test kills it.

So a fault strikes in that very iteration, however fast training is.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from megatron_ft.environment import INCARNATION
from megatron_ft.launch.startup.sitecustomize import LOOP, AfterImport, run_hidden

RANK, ITERATION = "1", 11


def hold() -> None:
    from megatron.training import get_args, training

    step = training.train_step

    def held(*args: Any, **kwargs: Any) -> Any:
        if get_args().curr_iteration + 1 == ITERATION:
            signal.pause()
        return step(*args, **kwargs)

    training.train_step = held


if __name__ == "sitecustomize":
    if os.environ.get("RANK") == RANK and os.environ.get(INCARNATION) == "1":
        AfterImport(LOOP, hold).install()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
