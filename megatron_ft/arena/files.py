"""Making and opening arena files safely: names, owners, lengths, allocated blocks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.arena import limits, mapping
from megatron_ft.core import private_files
from megatron_ft.core.errors import (
    ArenaError,
    ArenaForeignError,
    ArenaMemoryError,
    ArenaTruncatedError,
    UntrustedFileError,
)

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_file(path: Path, length: int, arithmetic: str, *, replace: bool) -> Iterator[int]:
    """A descriptor of an allocated file that gets its name when the block ends well.

    If the block raises, no file is left.  The descriptor is closed at the end.
    """
    _make_parent(path.parent)
    if not replace and os.path.lexists(path):
        raise ArenaError(
            f"{path} exists and may hold the only copy of a snapshot: open it, or remove it first"
        )
    temporary = path.with_name(path.name + ".tmp")
    fd = _open_new(temporary, length, arithmetic)
    try:
        mapping.allocate(fd, length)
        _allocate(fd, path.parent, length, arithmetic)
        yield fd
        # Not a link and an unlink: killed in between, two names would hold the memory.
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _open_new(temporary: Path, length: int, arithmetic: str) -> int:
    try:
        # Left by a creator that was killed: nobody else makes this shard's arena on this node.
        temporary.unlink(missing_ok=True)
        limits.check_memory(temporary.parent, length, arithmetic)
        return os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ArenaError(f"{temporary} cannot be made: {error.strerror}") from error


def _make_parent(folder: Path) -> None:
    missing = [f for f in (folder, *folder.parents) if not os.path.lexists(f)]
    try:
        if missing:
            _check_folder(missing[-1].parent)
        for one in reversed(missing):
            one.mkdir(mode=0o700, exist_ok=True)
        _check_folder(folder)
    except OSError as error:
        raise ArenaError(f"{folder} cannot be made or used: {error.strerror}") from error


def _check_folder(folder: Path) -> None:
    # A name that others can guess, in a folder that all may write, may be made by them first.
    reason = private_files.reason_against_parent(folder.stat())
    if reason:
        raise ArenaForeignError(f"{folder} {reason}")


def _allocate(fd: int, folder: Path, length: int, arithmetic: str) -> None:
    try:
        os.posix_fallocate(fd, 0, length)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise ArenaError(f"{folder} cannot hold arenas: {error.strerror}") from error
        space = limits.MemoryReading(
            f"the file system ({os.strerror(error.errno)})", _free_bytes(folder)
        )
        message = limits.shortage_message(folder, length, arithmetic, space)
        raise ArenaMemoryError(message) from error


def _free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def open_file(path: Path) -> int:
    """A descriptor of a plain file that only we can have written; the caller closes it."""
    try:
        return private_files.open_file(path, os.O_RDWR)
    except UntrustedFileError as error:
        raise ArenaForeignError(str(error)) from error
    except OSError as error:
        raise ArenaError(f"{path} cannot be opened: {error.strerror}") from error


def check_length(fd: int, path: Path, length: int) -> None:
    """Checks that the first ``length`` bytes are there, with memory behind: none can fault.

    ArenaTruncatedError if the file is shorter.  More bytes do no harm: nothing reads them.
    """
    info = os.fstat(fd)
    if info.st_size < length:
        raise ArenaTruncatedError(
            f"{path} has {info.st_size} bytes where its header needs {length}: somebody cut it; "
            "the shard counts as lost, remove the file"
        )
    holes = length - info.st_blocks * 512
    if holes > 0:
        # From a sparse copy: touching a hole on a full tmpfs would be a SIGBUS.
        limits.check_memory(path.parent, holes, "the holes of a sparse file")
        _allocate(fd, path.parent, length, "the holes of a sparse file")
