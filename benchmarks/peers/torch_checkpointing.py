"""torch_checkpointing, configured as its documentation says for machines without a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.methods import State
from benchmarks.peers.torch_own import InFolders


class TorchCheckpointing(InFolders):
    """CheckpointManager with asynchronous saves; pinned memory where there is an accelerator."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        library = import_module("torch_checkpointing")
        config = import_module("torch_checkpointing.config")
        there = torch.accelerator.is_available()
        staging = config.CheckpointStagerConfig(
            use_pinned_memory=there, use_non_blocking_copy=there
        )
        saver = config.AsyncCheckpointSaverConfig(staging_config=staging)
        self._manager: Any = library.CheckpointManager.Config(save=saver).build()
        self._future: Any = None

    def save(self, iteration: int, state: State) -> bool:
        """Begin when the last one is done."""
        self.settle()
        self._future = self._manager.save(self.place(iteration), {"model": state})
        return True

    def fence(self) -> None:
        """Wait for the staging of a save that runs."""
        with self._manager.lock():
            pass

    def settle(self) -> None:
        """Wait for the files."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self, state: State) -> None:
        """Read into the live tensors."""
        self._manager.load(self.newest(), into={"model": state})

    def close(self) -> None:
        """End its process."""
        self._manager.close()
