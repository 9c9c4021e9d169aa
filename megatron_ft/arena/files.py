"""Arena files: making and opening them safely, and reading their header.

A file is checked for its owner, kind, length and allocated blocks before it is mapped.  Anything
but a plain file of ours in an arena's place is given another name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.arena import binary, limits, mapping
from megatron_ft.arena import format as fmt
from megatron_ft.arena.binary import RecordPlace
from megatron_ft.arena.format import ArenaHeader, Geometry
from megatron_ft.core import private_files
from megatron_ft.core.errors import (
    ArenaCorruptError,
    ArenaError,
    ArenaForeignError,
    ArenaMemoryError,
    ArenaTruncatedError,
    UntrustedFileError,
)

HEADER_PLACE = RecordPlace(fmt.HEADER_OFFSET, fmt.HEADER_COPY_BYTES, binary.KIND_HEADER)

MODE = 0o600
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_file(
    path: Path, length: int, arithmetic: str, *, replace: bool, first: int, owed: int
) -> Iterator[int]:
    """A descriptor of a file that gets its name when the block ends well.

    Its ``first`` bytes are allocated, the rest are holes, for which the limits leave room, and for
    ``owed`` more bytes.  If the block raises, no file is left.  The descriptor is closed at the
    end.
    """
    _make_parent(path.parent)
    if not replace and os.path.lexists(path):
        raise ArenaError(
            f"{path} exists and may hold the only copy of a snapshot: open it, or remove it first"
        )
    temporary = path.with_name(path.name + ".tmp")
    if owed:
        arithmetic += f"; {limits.format_bytes(owed)} of it for other arenas"
    fd = _open_new(temporary, length + owed, arithmetic)
    try:
        mapping.allocate(fd, 0, first)
        allocate(fd, path.parent, 0, first, arithmetic)
        os.ftruncate(fd, length)
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
        return os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL, MODE)
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


def allocate(fd: int, folder: Path, start: int, length: int, arithmetic: str) -> None:
    """Allocate a range of a file in ``folder``; ArenaMemoryError if there is no memory."""
    try:
        os.posix_fallocate(fd, start, length)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise ArenaError(f"{folder} cannot hold arenas: {error.strerror}") from error
        space = os.statvfs(folder)
        free = limits.MemoryReading(
            f"the file system ({os.strerror(error.errno)})", space.f_bavail * space.f_frsize
        )
        message = limits.shortage_message(folder, length, arithmetic, free)
        raise ArenaMemoryError(message) from error


def open_file(path: Path) -> int:
    """A descriptor of a plain file that only we can have written; the caller closes it."""
    try:
        return private_files.open_file(path, os.O_RDWR)
    except UntrustedFileError as error:
        raise ArenaForeignError(str(error)) from error
    except OSError as error:
        raise ArenaError(f"{path} cannot be opened: {error.strerror}") from error


def check_length(fd: int, path: Path, length: int) -> None:
    """ArenaTruncatedError if the file is shorter.  More bytes do no harm: nothing reads them."""
    size = os.fstat(fd).st_size
    if size < length:
        raise ArenaTruncatedError(
            f"{path} has {size} bytes where its header needs {length}: somebody cut it; "
            "the shard counts as lost, remove the file"
        )


def holes(fd: int, length: int) -> int:
    """Bytes without memory among the first ``length`` ones; nobody may touch them."""
    return max(0, length - os.fstat(fd).st_blocks * 512)


def fill_holes(fd: int, path: Path, ranges: Iterable[tuple[int, int]], missing: int) -> None:
    """Allocate these ranges (offset, length), of which ``missing`` bytes have no memory.

    A sparse copy has holes.  Touching one on a full tmpfs would be a SIGBUS.
    """
    if missing > 0:
        limits.check_memory(path.parent, missing, "the holes of a sparse file")
    for start, length in ranges:
        allocate(fd, path.parent, start, length, "the holes of a sparse file")


def both_damaged(path: Path, what: str) -> str:
    """Message: both copies of a record are damaged, the consequence, and the remedy."""
    return (
        f"both copies of the {what} of {path} are damaged: the shard counts as lost and is "
        "rebuilt from its stripe; remove the file"
    )


def read_header(fd: int, path: Path) -> ArenaHeader:
    """The header after the checks of ``Arena.open`` that need no job and no length."""
    binary.check_preamble(os.pread(fd, binary.PREAMBLE_BYTES, 0), str(path))
    place = HEADER_PLACE

    def copies() -> binary.Copies:
        first = os.pread(fd, place.copy_bytes, place.offset)
        return first, os.pread(fd, place.copy_bytes, place.offset + place.copy_bytes)

    raw = binary.read_settled(copies, place)
    if raw is None:
        check_length(fd, path, Geometry(1, 1, 0, 1).file_bytes)
        raise ArenaCorruptError(both_damaged(path, "arena header"))
    return binary.unpack_header(raw)


ASIDE = ".aside"
"""Suffix of the names of files that were set aside."""


def reason_in_the_way(path: Path) -> str:
    """The reason why the file at an arena's path cannot be ours; "" if it may be."""
    info = path.lstat()
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        # A wrong mode is put right: the folder lets nobody else in.
        return private_files.reason_against(info, forbidden=0)
    return private_files.reason_against(info)


def set_aside(path: Path) -> Path:
    """Give a file, folder or link another name in the same folder; returns it."""
    number, target = 0, path.with_name(path.name + ASIDE)
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}{ASIDE}{number}")
    path.rename(target)
    return target


def remove(path: Path) -> None:
    """Remove a file or link, or a folder that is empty; one that is not stays."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        try:
            path.rmdir()
        except OSError:
            return


def clear(path: Path) -> None:
    remove(path)
    if os.path.lexists(path):
        set_aside(path)
