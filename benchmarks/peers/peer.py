"""What every way of saving is asked to do, and how little most of them need to say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.methods import Asked, State


class Peer(Asked):
    """One rank's side of a way of saving; the defaults are those of one that just returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, iteration: int, state: State) -> bool:
        """Begin to save at an iteration's end; whether it did."""
        raise NotImplementedError

    def fence(self) -> None:
        """Return when the state may change."""

    def settle(self) -> None:
        """Return when what was saved last outlives a node, as far as it ever will."""

    def close(self) -> None:
        """Let go of everything."""

    def save_alone(
        self, iteration: int, state: State, compute: Callable[[], object]
    ) -> tuple[int, float]:
        """A save that ends safe, with nothing beside it; its iteration, and when it began.

        ``compute`` comes before it, as before the end of an iteration.
        """
        compute()
        started = time.perf_counter()
        self.save(iteration, state)
        return iteration, started

    def tidy(self) -> None:
        """Remove older saves, outside of what is timed."""

    def load(self, state: State) -> None:
        """Fill the tensors from the newest save, in a process that did not make it."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Do what a survivor must do when another rank is gone; whether there is anything."""
        return False


def copy_into(state: State, found: State) -> None:
    """Every tensor's values into the live one of the same name."""
    for name, tensor in state.items():
        tensor.copy_(found[name])
