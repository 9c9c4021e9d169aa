"""A training loop on a loader, in one process, that is stopped and started again in a new one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_ft.trainer import resumable_loader
from megatron_ft.trainer.loader_habits import Clock
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.resumable_loader import ResumableLoader
from megatron_ft.trainer.state import RngState

Script = Callable[[Any], Iterator[Any]]


def passes(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def numbered(loader: Any) -> Iterator[Any]:
    """Passes whose number is given to the sampler and to the data set, from 0 in each process."""
    for epoch in range(1000):
        for one in (loader.sampler, loader.dataset):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        yield from loader


def seen(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def new_process(seed: int) -> None:
    """Forget what the process knows of loaders, and have other random numbers."""
    resumable_loader._forget()
    Clock.runs = True
    for begin in (torch.manual_seed, random.seed, np.random.seed):
        begin(seed)


class Run:
    """A process that trains: what it has used, and what a snapshot of it holds."""

    def __init__(self, make: Callable[[], Any], script: Script = passes, seed: int = 1) -> None:
        new_process(seed)
        self.loader = ResumableLoader(make())
        self.state: dict[str, Any] = {"loader": self.loader, "rng": RngState(), "used": list[Any]()}
        self.script, self._data = script, iter(())
        self._began = False

    def train(self, steps: int) -> list[Any]:
        """Train so many iterations; all that was used."""
        if not self._began:
            self._began, self._data = True, self.script(self.loader)
        for _ in range(steps):
            self.state["used"].append(seen(next(self._data)))
            torch.rand(()), random.random(), np.random.rand()
            resumable_loader.iteration_ended()
        return list(self.state["used"])

    def snapshot(self) -> dict[str, Any]:
        """The small objects, as an arena holds them; the trace of a pass must be known."""
        position = self.loader.state_dict()
        assert position["consumed"] is None or position["trace"] is not None
        state = MappingState(self.state)
        state.refresh()
        assert not state.tensors() and not state.boundary_tensors()
        return state.objects()

    def restored(self, snapshot: dict[str, Any]) -> Run:
        MappingState(self.state).load(snapshot)
        return self


def uninterrupted(make: Callable[[], Any], steps: int, script: Script = passes) -> list[Any]:
    """What training uses without snapshots."""
    new_process(1)
    data, used = script(make()), list[Any]()
    for _ in range(steps):
        used.append(seen(next(data)))
        torch.rand(()), random.random(), np.random.rand()
    return used


def continued(
    make: Callable[[], Any], stop: int, more: int, script: Script = passes, stops: int = 1
) -> list[Any]:
    """What a training uses that is stopped behind ``stop`` iterations, and again each ``more``."""
    run = Run(make, script)
    run.train(stop)
    for number in range(stops):
        snapshot = run.snapshot()
        run = Run(make, script, seed=99 + number).restored(snapshot)
        run.train(more)
    return list(run.state["used"])
