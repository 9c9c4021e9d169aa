"""examples/plain_pytorch.py, in which single bits flip silently.

MEGATRON_FT_TEST_FLIPS names a folder.  Of each file in it, ``<rank>-<iteration>-<what>``, a bit of
the first weight, moment or buffer flips on that rank when the iteration has ended, once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.programs.poisoned_training import load

FLIPS = "MEGATRON_FT_TEST_FLIPS"
WEIGHT, MOMENT, BUFFER = "weight", "moment", "buffer"
BIT = 4
"""Low in a mantissa: losses hardly show it."""


def target(state: dict[str, Any], what: str) -> torch.Tensor:
    weight: torch.Tensor = next(state["model"].parameters())
    if what == MOMENT:
        weight = state["optimizer"].state[weight]["exp_avg"]
    return next(state["model"].buffers()) if what == BUFFER else weight.detach()


def corrupted(train_one: Any, folder: Path) -> Any:
    """The example's training step, and what goes wrong after it."""

    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        loss = float(train_one(state, iteration, device))
        for flip in folder.glob(f"{os.environ['RANK']}-{iteration}-*"):
            flip.unlink()
            target(state, flip.name.split("-")[2]).view(-1).view(torch.uint8)[0] ^= 1 << BIT
        return loss

    return step


def main() -> None:
    training = load()
    training.train_one = corrupted(training.train_one, Path(os.environ[FLIPS]))
    training.main()


if __name__ == "__main__":
    main()
