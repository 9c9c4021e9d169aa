"""A training without collectives whose state grows in one iteration on some ranks.

Rank 0 unfreezes a large layer, rank 1 never does; every rank keeps a list that grows.  The result
is known beforehand: ``expected``.  A rank waits in its last iteration until a file is there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from megatron_ft import RngState, SnapshotConfig, SnapshotManager
from tests.support.captures import bits

WAIT_SECONDS = 150.0


class Training:
    def __init__(self, rank: int, change: int, values: int, width: int = 1024) -> None:
        torch.manual_seed(rank)
        self.rank, self.change, self.values = rank, change, values
        self.model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 4))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "losses": [],
            "rng": RngState(),
        }

    def step(self, iteration: int) -> None:
        self.model[0].requires_grad_(self.rank == 0 and iteration >= self.change)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        more = [float(loss.detach()) / k for k in range(1, 1 + self.values)]
        self.state["losses"] = self.state["losses"] + more

    def result(self) -> str:
        import hashlib

        found = hashlib.sha256(repr(self.state["losses"]).encode())
        for name, value in self.model.state_dict().items():
            found.update(name.encode() + bits(value))
        for key, moments in self.optimizer.state_dict()["state"].items():
            found.update(repr((key, [(k, bits(v)) for k, v in moments.items()])).encode())
        return found.hexdigest()


def expected(rank: int, change: int, values: int, iterations: int, width: int = 1024) -> str:
    training = Training(rank, change, values, width)
    for iteration in range(1, iterations + 1):
        training.step(iteration)
    return training.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--change", type=int, default=1 << 30)
    parser.add_argument("--values", type=int, default=0)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1, help="of an iteration: numbers count them")
    parser.add_argument("--every", type=int, default=1, help="iterations from save to save")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    training = Training(rank, arguments.change, arguments.values, arguments.width)
    snapshots = SnapshotManager(SnapshotConfig.from_env())
    tokens = arguments.tokens
    first = snapshots.load(into=training.state) // tokens
    snapshots.register_fence(training.optimizer)
    deadline = time.monotonic() + WAIT_SECONDS
    for iteration in range(first + 1, arguments.iterations + 1):
        while iteration == arguments.iterations and not (arguments.folder / "gate").exists():
            assert time.monotonic() < deadline, "the test has not opened the gate"
            snapshots.watch.iteration_ended((iteration - 1) * tokens)
            time.sleep(0.02)
        training.step(iteration)
        if iteration % arguments.every == 0:
            snapshots.save(iteration * tokens, training.state)
        time.sleep(0.05 / arguments.every)
    snapshots.close(finished=True)
    result = {"restored": first, "digest": training.result()}
    (arguments.folder / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
