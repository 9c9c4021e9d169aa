"""DLRover's flash checkpoint: a copy in shared memory, files when asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.methods import State
from benchmarks.peers.peer import Peer, copy_into

WAIT_SECONDS = 60.0


class FlashCheckpoint(Peer):
    """DdpCheckpointer: to memory in training; to files where it must outlive a node.

    The replicas in memory that it also offers are not restored by the release measured here.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        library: Any = import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        ranks = dist.get_world_size()
        self._storage = library.StorageType
        self._files = folder / "files"
        self._checkpointer: Any = library.DdpCheckpointer(
            str(self._files), local_shard_num=ranks, global_shard_num=ranks
        )
        self._awaited = 0

    def save(self, iteration: int, state: State) -> bool:
        """Copy to shared memory."""
        self._save(iteration, state, self._storage.MEMORY)
        return True

    def save_alone(
        self, iteration: int, state: State, compute: Callable[[], object]
    ) -> tuple[int, float]:
        """Copy to shared memory, and have the agent write files from there."""
        compute()
        started = time.perf_counter()
        self._save(iteration, state, self._storage.DISK)
        self._awaited = iteration
        return iteration, started

    def _save(self, iteration: int, state: State, storage: Any) -> None:
        self._checkpointer.save_checkpoint(iteration, dict(state), storage_type=storage)

    def settle(self) -> None:
        """Wait for the file that names the newest complete save on storage."""
        tracker = self._files / "dlrover_latest.txt"
        deadline = time.monotonic() + WAIT_SECONDS
        while self._awaited:
            if tracker.exists() and tracker.read_text().strip() == str(self._awaited):
                self._awaited = 0
            elif time.monotonic() > deadline:
                raise TimeoutError(f"no iteration {self._awaited} on storage in {WAIT_SECONDS} s")
            else:
                time.sleep(0.01)

    def load(self, state: State) -> None:
        """Map the segment and copy out of it."""
        copy_into(state, self._checkpointer.load_checkpoint())
