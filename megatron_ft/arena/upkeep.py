"""What the owner of a node's folder puts right about an arena file, and what it sets aside.

Mode, length and first bytes say nothing that the arena's header does not say better, so their
damage costs no shard.  What is no plain file of ours in an arena's place is given another name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from uuid import UUID

from megatron_ft.arena import binary, files
from megatron_ft.arena.arena import read_whole_header
from megatron_ft.arena.format import ArenaHeader
from megatron_ft.core import private_files
from megatron_ft.core.errors import ArenaError

ASIDE = ".aside"
"""Ends the names of what was set aside."""

_VERSION_AT = binary.PREAMBLE_BYTES - 4
_NEWEST_VERSION = 63
"""A format version up to here may be another release's; a higher one is damage."""


def reason_in_the_way(path: Path) -> str:
    """Why what lies at an arena's path cannot be an arena of ours; "" if it may be one."""
    info = path.lstat()
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        # A wrong mode is put right: the folder lets nobody else in.
        return private_files.reason_against(info, forbidden=0)
    return private_files.reason_against(info)


def set_aside(path: Path) -> Path:
    """Give a file, folder or link another name beside its own; returns it."""
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
    """Have nothing at this path any more."""
    remove(path)
    if os.path.lexists(path):
        set_aside(path)


def put_right(path: Path, job: UUID, known: ArenaHeader | None = None) -> list[str]:
    """Mend mode, first bytes and length of the arena file of ``job``; names of what was wrong.

    ``known`` is its header if its owner remembers it; otherwise a whole copy in the file says
    what it must be, and without one nothing but the mode is mended.  ArenaError if the file
    cannot be opened at all.
    """
    mended = []
    mode = stat.S_IMODE(path.lstat().st_mode)
    if mode != 0o600:
        path.chmod(0o600)
        mended.append(f"mode {mode:o}")
    fd = files.open_file(path)
    try:
        header = known or _header_of(fd, path)
        if header is None or header.job != job:
            return mended
        if os.pread(fd, binary.PREAMBLE_BYTES, 0) != binary.pack_preamble():
            os.pwrite(fd, binary.pack_preamble(), 0)
            mended.append("first bytes")
        length = os.fstat(fd).st_size
        if length > header.geometry.file_bytes:
            os.ftruncate(fd, header.geometry.file_bytes)
            mended.append(f"length {length}")
    finally:
        os.close(fd)
    return mended


def _header_of(fd: int, path: Path) -> ArenaHeader | None:
    """The header by a whole copy of it, unless the file may be another release's."""
    ours, raw = binary.pack_preamble(), os.pread(fd, binary.PREAMBLE_BYTES, 0)
    version = int.from_bytes(raw[_VERSION_AT:], "little")
    other_release = raw[:_VERSION_AT] == ours[:_VERSION_AT] and 0 < version <= _NEWEST_VERSION
    if raw != ours and other_release:
        return None
    try:
        return read_whole_header(fd, path)
    except ArenaError:
        return None
