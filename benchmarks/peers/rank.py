"""One rank under one way of saving.  Its first incarnation trains, saves and is killed; each later
one loads what the last has saved, saves anew and is killed as well.

python -m benchmarks.peers.rank PLAN      PLAN: the fields of Plan as JSON
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks import program
from benchmarks.peers.catalogue import WAYS
from benchmarks.peers.peer import Peer
from benchmarks.peers.stamps import stamp, stamped
from benchmarks.rounds import seconds

SAVED, LOADS, FLUSHES = "saved.json", "loads.jsonl", "flushes.jsonl"
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
    incarnations: int
    """Incarnations that load, each of new processes."""


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
            self._save_stamped(0)
        found = {"pairs": pairs, "singles": singles, "iteration": self.training.iteration}
        self._add(SAVED, found, by=0)
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
        while self.peer.decides and (training.iteration + 1) % every:
            training.iterate(False)  # so that saves fall where those of the others do
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
        training.compute()
        copy = training.copied()
        dist.barrier()
        training.iteration, began = peer.save_alone(
            training.iteration + 1, training.state, training.compute
        )
        peer.fence()
        blocked = time.perf_counter() - began
        peer.settle()
        safe = time.perf_counter() - began
        training.update()
        peer.tidy()
        return {"copy": slowest(copy), "blocked": slowest(blocked), "safe": slowest(safe)}

    def _save_stamped(self, incarnation: int) -> None:
        """A save of values that no other incarnation has."""
        stamp(self.training.state.values(), dist.get_rank(), incarnation)
        self.single()

    def load(self, before: int) -> None:
        """Load into tensors that were used before; whether every value is right is kept too.

        ``before``: incarnations that have loaded.  All but the last then save other values, so
        that each loads what was saved in other processes, and the job has made progress when it
        fails.
        """
        training, rank = self.training, dist.get_rank()
        dist.barrier()  # ranks copy together, as they load
        copy = slowest(statistics.median(training.copied() for _ in range(COPIES)))
        dist.barrier()
        took = slowest(seconds(lambda: self.peer.load(training.state)))
        wrong = slowest(0.0 if stamped(training.state.values(), rank, before) else 1.0)
        training.iteration = lines(self.folder / (LOADS if before else SAVED))[-1]["iteration"]
        last = before + 1 >= self.plan.incarnations
        if not last:
            self._save_stamped(before + 1)
        found = {"copy": copy, "load": took, "right": not wrong, "iteration": training.iteration}
        self._add(LOADS, found, by=0)
        if not last:
            self._fail()

    def _fail(self) -> None:
        """Rank 0 is lost; others do what that asks of them, then are killed as well."""
        dist.barrier()
        if (rank := dist.get_rank()) != 0:
            started = time.perf_counter()
            if self.peer.flush():
                self._add(FLUSHES, {"seconds": time.perf_counter() - started}, by=rank)
        die()

    def _add(self, name: str, found: object, by: int) -> None:
        """One more line of one rank's findings."""
        if dist.get_rank() == by:
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(found) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    """What ranks have found, a line each; none if nobody has come so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def slowest(value: float) -> float:
    """The largest of all ranks' values: training waits for it."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def die() -> None:
    """End the way a crash does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train or load, whichever this incarnation is for."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = not (Path(plan.folder) / SAVED).exists()
    before = len(lines(Path(plan.folder) / LOADS))
    rank = Rank(plan)
    rank.train() if first else rank.load(before)
    rank.peer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
