"""Snapshots over one training run: from Megatron's set-up to the end of its loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_ft.environment import RESTORE
from megatron_ft.megatron.manager import Manager
from megatron_ft.megatron.optimizer import optimizer_parts
from megatron_ft.megatron.state import MegatronState

_DISK_SOURCES = ("load", "pretrained_checkpoint")


def restores_from_disk(environment: Mapping[str, str] | None = None) -> bool:
    """True if the supervisor decided that this life starts from Megatron's own ``--load``."""
    return (os.environ if environment is None else environment).get(RESTORE) == "disk"


@contextmanager
def without_disk_load(args: Any) -> Iterator[None]:
    """Megatron's set-up loads no checkpoint inside this; its arguments are as before after it."""
    given = {name: getattr(args, name, None) for name in _DISK_SOURCES}
    for name in _DISK_SOURCES:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


class SnapshotRun:
    """One run: restores at its start, captures at iteration ends, fences the optimizer.

    Holds the model and optimizer through its state, so it must be closed with the run;
    :mod:`megatron_ft.megatron.hooks` does.
    """

    def __init__(self, args: Any, manager: Manager) -> None:
        self._args = args
        self._manager = manager
        self._state: MegatronState | None = None

    @property
    def memory_holds_snapshot(self) -> bool:
        """True if this rank was offered a snapshot to load, and is to use it."""
        return not restores_from_disk() and self._manager.has_snapshot

    def attach(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Take over what Megatron has built: restore into it, get an arena, guard its steps.

        Collective: all ranks have to come here.
        """
        self._state = MegatronState(model, optimizer, scheduler, self._args)
        if self.memory_holds_snapshot:
            started = time.perf_counter()
            iteration = self._manager.load(into=self._state)
            seconds = time.perf_counter() - started
            _print_rank_0(
                f" restored iteration {iteration} from the in-memory snapshot in {seconds:.2f} "
                "seconds; no checkpoint was read"
            )
        else:
            _print_rank_0(f" no in-memory snapshot restored: at iteration {self._args.iteration}")
        self._manager.prepare(self._state)
        for part in optimizer_parts(optimizer):
            # The inner one: it steps last, and not at all in an fp16 iteration that is skipped.
            self._manager.register_fence(part.optimizer)

    def begin_training(self) -> None:
        """Megatron has built its data iterators and enters its loop."""
        assert self._state is not None, "attach comes first"
        self._state.restore_random_states()

    def end_iteration(self, iteration: int, operations: float, data_iterator: Any) -> None:
        """All state of ``iteration`` is final: capture it if a snapshot is due."""
        assert self._state is not None, "attach comes first"
        self._state.at(iteration, operations, data_iterator)
        self._manager.save(iteration, self._state)

    def close(self) -> None:
        """End captures and drop every reference to model and optimizer."""
        self._state = None
        self._manager.close()


def _print_rank_0(message: str) -> None:
    from megatron.training.utils import print_rank_0

    print_rank_0(message)
