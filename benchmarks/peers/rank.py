"""One rank under one way of saving.  Its first life trains, saves and is killed; later ones load.

python -m benchmarks.peers.rank PLAN      PLAN: the fields of Plan as JSON
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks import program
from benchmarks.methods import State
from benchmarks.peers.catalogue import WAYS
from benchmarks.peers.peer import Peer
from benchmarks.rounds import seconds

SAVED, LOADS, FLUSHED = "saved.json", "loads.jsonl", "flushed.json"
COPIES = 5


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do.  ``work``: forward and backward in copies; ``every``: iterations a save."""

    way: str
    folder: str
    tensors: int
    mib: int
    work: float
    every: int
    iterations: int
    rounds: int
    lives: int
    """Lives that load, each of new processes."""


class Rank:
    """A training and a way to save it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.folder = plan, Path(plan.folder)
        self.peer: Peer = WAYS[plan.way].make(self.folder)
        load = program.Plan(
            method=plan.way, tensors=plan.tensors, mib=plan.mib, work=plan.work, rounds=0, phase=0,
            out="", folder=plan.folder,
        )  # fmt: skip
        self.training = program.Training(load, self.peer)
        self.training.update()

    def train(self) -> None:
        """Phases with and without saves, single saves, one last save; then the end."""
        saves = self.plan.way != "none"
        if saves:
            self.single()
        pairs = [self.pair(number) for number in range(self.plan.rounds + 1)][1:]
        singles = [self.single() for _ in range(self.plan.rounds)] if saves else []
        if saves:
            stamp(self.training.state)
            self.single()
        if dist.get_rank() == 0:
            self._write(SAVED, {"pairs": pairs, "singles": singles})
        dist.barrier()
        if saves:
            self._fail()

    def pair(self, number: int) -> dict[str, float]:
        """Two phases, in an order that changes: seconds without saves, with them, and the saves."""
        found = {}
        for saves in (False, True) if number % 2 else (True, False):
            found["on" if saves else "off"], saved = self._phase(saves)
            found.update({"saved": saved} if saves else {})
        return found

    def _phase(self, saves: bool) -> tuple[float, float]:
        training, every = self.training, self.plan.every
        training.turn(saves)
        dist.barrier()
        started, saved = time.perf_counter(), 0.0
        for number in range(self.plan.iterations):
            due = saves and (self.peer.decides or number % every == 0)
            saved += training.iterate(due)["saved"]
        training.method.fence()
        dist.barrier()
        took = time.perf_counter() - started
        if saves and self.plan.way != "none":
            self.peer.settle()
            self.peer.tidy()
        return took, saved

    def single(self) -> dict[str, float]:
        """One save with nothing to hide behind: a copy, held, until safe; of the slowest rank."""
        training, peer = self.training, self.peer
        dist.barrier()
        copy = training.copied()
        dist.barrier()
        training.iteration, began = peer.save_alone(training.iteration + 1, training.state)
        peer.fence()
        blocked = time.perf_counter() - began
        peer.settle()
        safe = time.perf_counter() - began
        training.update()
        peer.tidy()
        return {"copy": slowest(copy), "blocked": slowest(blocked), "safe": slowest(safe)}

    def _fail(self) -> None:
        """Rank 0 is lost; others do what that asks of them, then are killed as well."""
        if dist.get_rank() != 0:
            started = time.perf_counter()
            if self.peer.flush():
                self._write(FLUSHED, {"seconds": time.perf_counter() - started})
        die()

    def load(self) -> None:
        """Load into tensors that were used before; whether every value is right is kept too."""
        copy = slowest(statistics.median(self.training.copied() for _ in range(COPIES)))
        dist.barrier()
        took = slowest(seconds(lambda: self.peer.load(self.training.state)))
        wrong = slowest(0.0 if stamped(self.training.state) else 1.0)
        if dist.get_rank() == 0:
            line = json.dumps({"copy": copy, "load": took, "right": wrong == 0.0})
            with (self.folder / LOADS).open("a") as file:
                file.write(line + "\n")
        dist.barrier()
        if len((self.folder / LOADS).read_text().splitlines()) < self.plan.lives:
            dist.barrier()
            die()

    def _write(self, name: str, found: object) -> None:
        temporary = self.folder / f"{name}.tmp"
        temporary.write_text(json.dumps(found))
        temporary.rename(self.folder / name)


def stamp(state: State) -> None:
    """Values that tell rank and tensor apart."""
    _each(state, lambda tensor, value: tensor.fill_(value))


def stamped(state: State) -> bool:
    """Whether every value is what ``stamp`` has written."""
    right: list[bool] = []
    _each(state, lambda tensor, value: right.append(bool((tensor == value).all())))
    return all(right)


def _each(state: State, do: Callable[[torch.Tensor, float], object]) -> None:
    for number, tensor in enumerate(state.values()):
        do(tensor, float(1000 * (dist.get_rank() + 1) + number))


def slowest(value: float) -> float:
    """The largest of all ranks' values: training waits for it."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def die() -> None:
    """End the way a crash does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train or load, whichever this life is for."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = not (Path(plan.folder) / SAVED).exists()
    rank = Rank(plan)
    rank.train() if first else rank.load()
    rank.peer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
