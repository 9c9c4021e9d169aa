"""Files that are there in full after a power loss, or not at all.

Everything that is done to a disk goes through ``Disk``, one method for each system call
that can fail or be the last one before a crash; tests stop it at each of them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".tmp"
FILE_MODE, FOLDER_MODE = 0o644, 0o775
"""Less the umask: who may read a checkpoint is the user's to say, but nobody else changes it."""
SYNC_BYTES = 64 << 20
"""Written data are flushed in portions of this size, so that they never fill the page cache."""


def mount_point(folder: Path) -> Path:
    """The folder on which the file system is mounted that holds ``folder``; "/" at last."""
    real = folder.resolve()
    return next(one for one in (real, *real.parents) if os.path.ismount(one))


class Disk:
    """The system calls of a drain.  OSError passes through: full, read-only, broken."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; the names are durable on return."""
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        for one in reversed(missing):
            one.mkdir(mode=FOLDER_MODE, exist_ok=True)
            self.sync_folder(one.parent)

    def write_file(self, path: Path, pieces: Iterable[Any]) -> None:
        """Make or replace a file of these pieces (buffers of bytes), durable on return.

        Nothing is ever seen under ``path`` but the old file or the whole new one.
        """
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
        descriptor = self.create(temporary)
        try:
            try:
                self._fill(descriptor, pieces)
            finally:
                os.close(descriptor)
            self.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise
        self.sync_folder(path.parent)

    def _fill(self, descriptor: int, pieces: Iterable[Any]) -> None:
        unsynced = 0
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            unsynced += len(rest)
            while rest:
                rest = rest[self.write(descriptor, rest) :]
            if unsynced >= SYNC_BYTES:
                self.sync(descriptor)
                unsynced = 0
        self.sync(descriptor)

    def create(self, path: Path) -> int:
        """Open a file that does not exist yet for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def open(self, path: Path) -> int:
        """Open a file for reading; links are refused, and a FIFO is not waited for."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, descriptor: int, buffer: memoryview, at: int) -> int:
        """Read some bytes of the file from ``at`` on into ``buffer``; how many, 0 at its end."""
        return os.preadv(descriptor, [buffer], at)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``; how much."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """All that was written to the file is on the disk."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name, over one that has it."""
        os.rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        """All names in the folder are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(folder)
