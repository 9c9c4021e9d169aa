"""What torch brings without DCP, writing to a memory file system in place of shared storage."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.methods import State
from benchmarks.peers.peer import Peer, copy_into


class Nothing(Peer):
    """No saves at all: what two equal phases differ by."""

    def save(self, iteration: int, state: State) -> bool:
        """Does nothing."""
        return False


class TorchSave(Peer):
    """torch.save to a temporary name, then a rename."""

    def _path(self) -> Path:
        return self.folder / f"rank{dist.get_rank()}.pt"

    def save(self, iteration: int, state: State) -> bool:
        """Write the file."""
        temporary = self._path().with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self._path())
        return True

    def load(self, state: State) -> None:
        """Read the file."""
        copy_into(state, torch.load(self._path(), weights_only=True))


class InFolders(Peer):
    """Saves that are a folder each, of all ranks; the older ones are removed by hand."""

    last = 0

    def place(self, iteration: int) -> str:
        """The folder of one save."""
        self.last = iteration
        return str(self.folder / "saved" / f"iteration{iteration}")

    def newest(self) -> str:
        """The folder of the newest save."""
        folders = (self.folder / "saved").glob("iteration*")
        return str(max(folders, key=lambda path: int(path.name[9:])))

    def tidy(self) -> None:
        """Keep the last one."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in (self.folder / "saved").glob("iteration*"):
                if path.name != f"iteration{self.last}":
                    shutil.rmtree(path)
        dist.barrier()
