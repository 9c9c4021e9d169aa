"""torch.distributed.checkpoint, writing to a memory file system in place of shared storage.

A module of its own: importing DCP takes a third as long as importing torch and all the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.methods import State
from benchmarks.peers.torch_own import InFolders


class DcpSave(InFolders):
    """torch.distributed.checkpoint.save."""

    @staticmethod
    def named(state: State) -> State:
        """Ranks hold different tensors, so their names differ."""
        return {f"rank{dist.get_rank()}.{name}": tensor for name, tensor in state.items()}

    def save(self, iteration: int, state: State) -> bool:
        """Write all of it."""
        save(self.named(state), checkpoint_id=self.place(iteration))
        return True

    def load(self, state: State) -> None:
        """Read into the live tensors."""
        load(self.named(state), checkpoint_id=self.newest())


class DcpThread(DcpSave):
    """torch.distributed.checkpoint.async_save, written by a thread."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None

    def save(self, iteration: int, state: State) -> bool:
        """Begin when the last one is done: two at once are refused."""
        self.settle()
        self._future = async_save(
            self.named(state),
            checkpoint_id=self.place(iteration),
            process_group=self._group,
            async_checkpointer_type=self.kind,
        )
        return True

    def settle(self) -> None:
        """Wait for the files."""
        if self._future is not None:
            self._future.result()
            self._future = None


class DcpProcess(DcpThread):
    """The same, written by a process."""

    kind = AsyncCheckpointerType.PROCESS
