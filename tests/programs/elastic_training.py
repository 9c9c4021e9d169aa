"""A training whose result does not depend on the number of its ranks, and needs no collective.

Each rank owns a range of one vector and of its momentum, and takes its share of each iteration's
samples.  An element's next value depends on itself and the iteration alone, so the vector after
N iterations is known beforehand: ``expected``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ft import SnapshotManager
from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.identity import RankRule
from megatron_ft.core.shard import LogicalPlace, Piece, split_range

ELEMENTS = 100_003
BATCH = 12
WAIT_SECONDS = 120.0


def step(vector: Any, momentum: Any, iteration: int) -> None:
    """One iteration, in place; the same for numpy and torch, element by element."""
    momentum *= 0.5
    momentum += vector
    vector -= 0.25 * momentum
    vector += iteration


def expected(iterations: int, elements: int = ELEMENTS) -> tuple[Any, Any]:
    vector, momentum = np.arange(elements, dtype=np.float32), np.zeros(elements, np.float32)
    for iteration in range(1, iterations + 1):
        step(vector, momentum, iteration)
    return vector, momentum


class OwnedRange:
    """The state of one rank, as its snapshot manager sees it; TrainingState."""

    def __init__(self, rank: int, ranks: int, elements: int) -> None:
        self.elements, self.iteration = elements, 0
        self.start, stop = split_range(elements, rank, ranks)
        self.vector = torch.arange(self.start, stop, dtype=torch.float32)
        self.momentum = torch.zeros(stop - self.start)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"vector": self.vector, "momentum": self.momentum}

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def replicas(self) -> Mapping[str, Any]:
        return {}

    def logical_map(self) -> Mapping[str, LogicalPlace]:
        shape = (self.elements,)
        return {
            name: LogicalPlace(
                self.start, self.elements, (Piece(name, shape, (0,), shape, 0, (1,)),)
            )
            for name in self.tensors()
        }

    def objects(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "elements": self.elements}

    def expect_reshape(self) -> None:
        pass

    def reshape_objects(
        self, shard_id: str, origins: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        return origins[0][1]

    def load(self, objects: dict[str, Any]) -> None:
        if objects["elements"] != self.elements:
            raise LayoutMismatchError("another number of elements")
        self.iteration = objects["iteration"]


def main() -> None:
    """Train, and write what this rank has trained on, and what it owns at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--declines", type=int, default=0, help="with so many ranks")
    parser.add_argument("--multiple", type=int, default=1, help="of which ranks are a multiple")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = OwnedRange(rank, ranks, options.elements)
    snapshots = SnapshotManager(rank_rule=RankRule(options.multiple, 1, BATCH))
    if options.declines == ranks:
        snapshots.decline("the test wants it")
    snapshots.load(into=state)
    snapshots.prepare(state)
    gate = options.folder / "gate"
    for iteration in range(state.iteration + 1, options.iterations + 1):
        if iteration == options.iterations:
            await_gate(gate)
        with snapshots.fence():
            step(state.vector, state.momentum, iteration)
        state.iteration = iteration
        note(options.folder / f"samples-{rank}", iteration, split_range(BATCH, rank, ranks))
        snapshots.save(iteration, state)
        # Nothing waits for an iteration any more once the test has let go of the last one.
        time.sleep(0.0 if gate.exists() else options.seconds)
    torch.save((state.start, state.vector, state.momentum), options.folder / f"end-{rank}-{ranks}")
    snapshots.close(finished=True)


def note(path: Path, iteration: int, share: tuple[int, int]) -> None:
    """Add a line: the numbers of the samples that this rank has used in an iteration."""
    first = (iteration - 1) * BATCH
    with path.open("a") as file:
        file.write(json.dumps([iteration, first + share[0], first + share[1]]) + "\n")


def await_gate(gate: Path) -> None:
    """Do not end before the test has done all that it wants to."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not gate.exists():
        assert time.monotonic() < deadline, f"{gate} was not made"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
