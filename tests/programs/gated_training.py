"""examples/plain_pytorch.py, whose last iteration begins once a file is there.

A variable names the file.  Faults that are to strike a job find it training, however
late they come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft import run_resilient
from tests.programs.poisoned_training import load

GATE = "MEGATRON_FT_TEST_GATE"
WAIT_SECONDS = 250.0


def gated(train_one: Any, last: int, gate: Path) -> Callable[[dict[str, Any], int, Any], float]:
    """The example's training step, which waits in the last iteration."""

    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        deadline = time.monotonic() + WAIT_SECONDS
        while iteration == last and not gate.exists():
            assert time.monotonic() < deadline, "the test's faults have not struck"
            time.sleep(0.02)
        return float(train_one(state, iteration, device))

    return step


def main() -> None:
    training = load()
    gate = Path(os.environ[GATE])
    training.train_one = gated(training.train_one, training.arguments().iterations, gate)
    run_resilient(training.main)


if __name__ == "__main__":
    main()
