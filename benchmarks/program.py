"""One rank of a measured training: phases with and without saves, then single saves.

python -m benchmarks.program PLAN      PLAN: the fields of Plan as JSON
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks.bare import BareCopies
from benchmarks.methods import METHODS, Method, State, saved_at_last
from benchmarks.rounds import seconds

WARM_UP = 3
TURNING = 6
"""Iterations between phases; permits are given for fewer ahead, as long as none was missed."""

MOMENT_SECONDS = 0.02
"""Forward and backward before a copy or a save that is measured alone: cores that come out of
idling copy 5 % slower."""

MOST = 500
"""Iterations of a phase in which the method saves too seldom to be measured."""


WAYS: dict[str, Callable[[Path], Method]] = {**METHODS, "bare": BareCopies}


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do.  ``work`` is the time of forward and backward in copies of the state.

    With ``copies`` a plain copy of the state is measured just before each save, as no part of the
    iteration: what a shared machine slows down for a while, it slows down for both.  With ``every``
    above 1 there is one phase, in which every so many-th iteration saves.  A ``control`` has the
    same phases, and saves in none.
    """

    method: str
    tensors: int
    mib: int
    work: float
    rounds: int
    phase: int
    out: str
    folder: str
    device: str = "cpu"
    singles: bool = False
    copies: bool = False
    every: int = 1
    control: bool = False


class Training:
    """A state and iterations that change all of it; forward and backward are products."""

    def __init__(self, plan: Plan, method: Method) -> None:
        numel = (plan.mib << 20) // 4 // plan.tensors
        self.state: State = {
            f"w{i}": torch.zeros(numel, device=plan.device) for i in range(plan.tensors)
        }
        self.method, self.device = method, plan.device
        self._copies, self._every = plan.copies, plan.every
        self.iteration = 0
        # Large enough to fill a GPU, small enough to stop one CPU core often.
        width = 192 if plan.device == "cpu" else 2048
        self._left = torch.rand(width, width, device=plan.device)
        self._buffer = torch.zeros(plan.mib << 18, pin_memory=plan.device != "cpu")
        self.copy_seconds = statistics.median(self.copied() for _ in range(WARM_UP + 4))
        one = self._calibrated()
        self._products = max(1, round(plan.work * self.copy_seconds / one))
        self._moment = max(1, round(MOMENT_SECONDS / one))

    def copied(self) -> float:
        """Seconds of one plain copy of the state into warm host memory."""

        def copy() -> None:
            at = 0
            for tensor in self.state.values():
                self._buffer[at : at + tensor.numel()].copy_(tensor)
                at += tensor.numel()

        return seconds(copy)

    def _calibrated(self) -> float:
        """Seconds of one product."""
        self._multiply(16)
        return min(seconds(lambda: self._multiply(64)) for _ in range(5)) / 64

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            self._left @ self._left
        self.wait()

    def wait(self) -> None:
        """Until the device is done."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def forward_backward(self) -> float:
        """The work that copies can hide behind; its seconds."""
        return seconds(lambda: self._multiply(self._products))

    def compute(self) -> None:
        """A moment of the same work."""
        self._multiply(self._moment)

    def update(self) -> None:
        """What an optimizer does: change everything in place."""
        torch._foreach_add_(list(self.state.values()), 1.0)

    def iterate(self, saves: bool) -> dict[str, float]:
        """One iteration: seconds of all of it, of forward and backward, and of its stalls."""
        self.iteration += 1
        started = time.perf_counter()
        work = self.forward_backward()
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        fence = seconds(self.method.fence)
        self.update()
        copy = self.copied() if self._copies else 0.0
        saved = False
        save_started, processor_started = time.perf_counter(), time.thread_time()
        if saves or self.method.decides:
            saved = self.method.save(self.iteration, self.state)
        save_processor = time.thread_time() - processor_started
        save = time.perf_counter() - save_started
        return {
            "total": time.perf_counter() - started - copy,
            "copy": copy,
            "work": work,
            "fence": fence,
            "save": save,
            "save_processor": save_processor,
            "saved": float(saved),
        }

    def phase(self, iterations: int, saves: bool) -> list[dict[str, float]]:
        """So many iterations, more if that is not enough for two saves with a fence after them."""
        self.turn(saves)
        done: list[dict[str, float]] = []
        while len(done) < iterations or (
            saves and len(done) < MOST and self._any_rank(_saved(done) < 2)
        ):
            done.append(self.iterate(saves and len(done) % self._every == 0))
        return done

    def _any_rank(self, wants: bool) -> bool:
        """True if one wants to continue: ranks iterate together, and may have saved unevenly."""
        if dist.is_initialized():
            votes = torch.tensor([float(wants)])
            dist.all_reduce(votes)
            return bool(votes.any())
        return wants

    def _every_rank(self, saved: bool) -> bool:
        """Whether all have saved: what one has missed is given up, and waiting for it in vain."""
        return not self._any_rank(not saved) if self.method.decides else saved

    def _together(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def turn(self, saves: bool) -> None:
        """Go over to a phase with saves or without, beside what is measured.

        A method that decides has agreed to its next saves by then: they are made, and are no
        part of a phase without any.
        """
        if not self.method.decides:
            return
        self.method.pause(not saves)
        made = [self.iterate(saves) for _ in range(TURNING)]
        while not saves and self._any_rank(any(one["saved"] for one in made)):
            # Where the machine is busy the job hears late that it is to pause.
            made = [self.iterate(saves) for _ in range(TURNING)]
        if not saves:
            self.method.idle()

    def single(self) -> dict[str, float]:
        """One save with nothing to hide behind: seconds of a copy, held, and until safe.

        Ranks copy together and begin to save together, as they end an iteration of a training.
        """
        self._together()
        self.compute()
        copy = self.copied()
        self._together()
        self.iteration, started = saved_at_last(
            self.method, self.iteration + 1, self.state, self.compute, self._every_rank
        )
        self.method.fence()
        blocked = time.perf_counter() - started
        self.method.settle()
        safe = time.perf_counter() - started
        self.update()
        return {"copy": copy, "blocked": blocked, "safe": safe}


def main() -> None:
    """Run the plan; rank 0 writes what it measured."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    torch.set_num_threads(1)
    if plan.method == "dcp" or _several():
        dist.init_process_group("gloo")
    method = WAYS[plan.method](Path(plan.folder))
    training = Training(plan, method)
    training.single()
    phases = _phases(plan, training)
    singles = [training.single() for _ in range(plan.rounds)] if plan.singles else []
    found = {"copy": training.copy_seconds, "phases": phases, "singles": singles}
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(plan.out).write_text(json.dumps(found))
    method.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _phases(plan: Plan, training: Training) -> list[list[dict[str, float]]]:
    """Pairs of phases, first without saves and then with them; or one of both."""
    if plan.every > 1:
        return [training.phase(plan.phase, not plan.control)]
    sides = (False, not plan.control)
    done = [training.phase(plan.phase, saves) for _ in range(plan.rounds + 1) for saves in sides]
    return done[len(sides) :]


def _saved(done: list[dict[str, float]]) -> float:
    return sum(one["saved"] for one in done[:-1])


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


if __name__ == "__main__":
    main()
