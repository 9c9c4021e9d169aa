"""lm-resiliency's checkpoints in memory: two of one's own and two of the partner."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.methods import State
from benchmarks.peers.peer import Peer, copy_into


class InMemoryPartner(Peer):
    """InMemoryCheckpointManager with a partner copy; integrity checks off, as by default.

    Copies live in the trainers, so a survivor must write them out when another rank is lost.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        library = import_module("lm_resiliency")
        config = library.InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=str(folder / "files"),
            run_id="benchmark",
            pin_memory=False,
        )
        low_level: Any = import_module("lm_resiliency.experimental")
        self._manager: Any = low_level.InMemoryCheckpointManager(config)

    def save(self, iteration: int, state: State) -> bool:
        """Copy, and send to the partner in the background."""
        self._manager.save(dict(state), iteration)
        return True

    def fence(self) -> None:
        """Wait for the copy."""
        self._manager.maybe_wait()

    def settle(self) -> None:
        """Wait for the partner's copy."""
        if not self._manager.finalize_replication():
            raise RuntimeError("the partner's copy did not complete")

    def flush(self) -> bool:
        """Write one's own and the partner's copies to storage."""
        self._manager.flush_for_restart()
        return True

    def load(self, state: State) -> None:
        """Read what the survivor has written."""
        found, _ = self._manager.load()
        copy_into(state, found)

    def close(self) -> None:
        """End without writing."""
        os.environ.pop("LM_RESILIENCY_RUN_ID", None)
        self._manager.close()
