"""A training of which every copy is as late as it may be, and whose snapshots are compared."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any, NamedTuple

import torch

from megatron_ft.trainer.binding import LayoutBinding
from megatron_ft.trainer.copier import CopyList
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.mapping import StateAdapter
from megatron_ft.trainer.state import live_tensors
from tests.support.captures import WAIT, FakeSmp, bits, make_manager

PIECE = 4096


class LatestCopier(CpuCopier):
    """Copies ``first`` pieces, and all others when training waits for them or is done.

    What ``save`` waits for is copied at once.
    """

    binding: LayoutBinding

    def __init__(self, first: int, piece_bytes: int) -> None:
        super().__init__(piece_bytes)
        self.first, self.go, self._lists = first, Event(), 0

    def begin(self) -> None:
        self.go.clear()
        self._lists = 0

    def copy(
        self, items: Any, mark: Any, should_stop: Callable[[], bool], arrivals: Any = None
    ) -> bool:
        if not isinstance(items, CopyList):
            return super().copy(items, mark, should_stop, arrivals)
        copied, self._lists = 0, self._lists + 1
        early = self._lists == 1 and self.binding.hurries

        def late() -> bool:
            nonlocal copied
            copied += not early
            assert copied <= self.first or self.go.wait(WAIT), "training never came to an end"
            return should_stop()

        return super().copy(items, mark, late, arrivals)


class Ended(NamedTuple):
    """Iterations whose snapshots were sealed, and reasons of the others by iteration."""

    sealed: list[int]
    given_up: dict[int, str]
    waited: list[int]
    """Iterations whose ``save`` returned when all was copied."""


class Trial:
    """Trains, captures every iteration, and compares what was sealed with the state of then."""

    def __init__(self, smp: FakeSmp, state: Any, first: int = 0, piece_bytes: int = PIECE) -> None:
        self.smp, self.state, self.copier = smp, state, LatestCopier(first, piece_bytes)
        self.manager: SnapshotManager = make_manager(smp, copier=self.copier)
        self.ended = Ended([], {}, [])
        self._iteration, self._adapt = 0, StateAdapter()
        with self.manager.fence():
            pass
        self.manager.prepare(state)
        capture = self.manager._captures
        assert capture._arena.engine is not None
        self.copier.binding = capture._arena.engine.binding
        self.copier.binding.sampler._random.seed(5)
        hold = capture._wait

        def hold_and_let_go(*, early: bool = False) -> bool:
            if not early:
                self.copier.go.set()
            return hold(early=early)

        capture._wait = hold_and_let_go  # type: ignore[method-assign]

    def save(self) -> None:
        self._iteration += 1
        self._truth = {n: bits(t) for n, t in live_tensors(self._adapt(self.state)).items()}
        self.copier.begin()
        self.snapshot = self.smp.grant(self._iteration, self._iteration % 2)
        ticket = self.manager.save(self._iteration, self.state)
        assert not ticket.skipped
        if self.run.moved.is_set():
            self.ended.waited.append(self._iteration)

    def skip(self) -> None:
        self._iteration += 1
        assert self.manager.save(self._iteration, self.state).skipped

    @property
    def run(self) -> Any:
        return self.manager._captures._run

    def finish(self) -> None:
        """Let the copy end, in the middle of an iteration."""
        self.copier.go.set()
        assert self.run.finished.wait(WAIT), "the copy thread did not finish"

    def settle(self) -> None:
        self.finish()
        if self.snapshot in self.smp.abandoned_ids:
            self.ended.given_up[self._iteration] = self.smp.abandoned_ids[self.snapshot]
            return
        stored = self.copier.binding._targets[self._iteration % 2]
        wrong = [name for name in stored if bits(stored[name]) != self._truth[name]]
        assert not wrong, f"{wrong} of iteration {self._iteration} were sealed torn"
        self.ended.sealed.append(self._iteration)

    def train(self, iterate: Callable[[int], object], iterations: int) -> Ended:
        """So many iterations, each with a snapshot at its end; the copies run during the next."""
        for number in range(1, iterations + 1):
            iterate(number)
            if number > 1:
                self.settle()
            self.save()
        self.settle()
        self.early = set(self.copier.binding._early)
        self.manager.close()
        return self.ended

    def restored(self, fresh: Any) -> Any:
        self.smp.offer_last()
        make_manager(self.smp).load(into=fresh)
        return fresh


def parameter(size: int = 20_000, value: float = 0.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((size,), value))
