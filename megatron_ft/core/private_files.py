"""Files, folders and sockets that only this user can have made.

What is checked is the open descriptor, so that nobody can exchange a file between the
check and its use, and a file is opened relative to its folder's descriptor.  Links are
never followed at the last two components of a path.  This module knows no other part of
the package but its errors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_ft.core.errors import UntrustedFileError

OTHERS = 0o077
"""Permissions of everybody else: nothing of what is in memory or secret grants any."""
OTHERS_WRITE = 0o022
"""Permissions that a checkpoint on disk must not grant; the user's umask decides on reading."""

SPARE_BYTES = 4096
"""A file of ``rewrite_file`` takes a multiple of this, and its spare as much."""

_KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISREG: "plain file",
    stat.S_ISDIR: "folder",
    stat.S_ISSOCK: "socket",
}


def reason_against(
    info: os.stat_result,
    kind: Callable[[int], bool] = stat.S_ISREG,
    forbidden: int = OTHERS,
    *,
    links: bool = False,
) -> str:
    """The reason why somebody else may have written this file, and the remedy; "" if none.

    ``kind`` is one of the functions S_ISREG, S_ISDIR, S_ISSOCK; ``forbidden`` the permission
    bits that it must not have.  A plain file with a second name is refused unless ``links``.
    """
    mode = stat.S_IMODE(info.st_mode)
    if not kind(info.st_mode):
        return f"is not a {_KINDS[kind]}: remove it"
    if info.st_uid != os.geteuid():
        return (
            f"belongs to user {info.st_uid}, not to {os.geteuid()}: it is not trusted; remove it, "
            "or choose another directory"
        )
    if mode & forbidden:
        what = "write to it: it is not trusted" if mode & forbidden & OTHERS_WRITE else "read it"
        return (
            f"has mode {mode:o}, so others may {what}; if it is yours, "
            f"`chmod {mode & ~forbidden & 0o777:o}` it, else remove it"
        )
    if kind is stat.S_ISREG and not links and info.st_nlink > 1:
        return f"has {info.st_nlink} names (hard links): remove it, or the other names"
    return ""


def open_folder(folder: Path, forbidden: int = OTHERS) -> int:
    """A descriptor of a folder of this user's; UntrustedFileError, or OSError if there is none."""
    descriptor = _open(folder, os.O_RDONLY | os.O_DIRECTORY, None)
    return _checked(descriptor, folder, stat.S_ISDIR, forbidden)


def open_file(path: Path, flags: int = os.O_RDONLY, *, forbidden: int = OTHERS) -> int:
    """A descriptor of a plain file of this user's in a folder that others cannot write to.

    With O_CREAT it is made with mode 0600.  UntrustedFileError says what is wrong and what
    to do; nothing was read.  OSError if it is not there.
    """
    parent = _open(path.parent, os.O_PATH | os.O_DIRECTORY, None)
    try:
        _refuse(path.parent, reason_against_parent(os.fstat(parent)))
        # O_NONBLOCK: a FIFO of that name must not hang us; it does nothing to a plain file.
        descriptor = _open(path, flags | os.O_NONBLOCK, parent)
    finally:
        os.close(parent)
    return _checked(descriptor, path, stat.S_ISREG, forbidden)


def reason_against_parent(info: os.stat_result) -> str:
    """The reason why others could exchange files in this folder; "" if nobody can.

    In a folder with the sticky bit (``/tmp``, ``/dev/shm``) everybody can make names, but
    nobody can take away ours.
    """
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
        return (
            f"belongs to user {info.st_uid} or is not a folder: run the command as its owner, or "
            "choose another directory"
        )
    if info.st_mode & OTHERS_WRITE and not info.st_mode & stat.S_ISVTX:
        return (
            f"has mode {stat.S_IMODE(info.st_mode):o}, so others may put files there: "
            "`chmod go-w` it, or choose another directory"
        )
    return ""


def _open(path: Path, flags: int, parent: int | None) -> int:
    name = path if parent is None else Path(path.name)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    except OSError as error:
        reason = refusal(error)
        if not reason:
            raise
        raise UntrustedFileError(f"{path} {reason}") from error


def refusal(error: OSError) -> str:
    """The reason in an open(2) error why the file cannot be ours; "" if it gives none."""
    return _REFUSALS.get(error.errno or 0, "")


_REFUSALS = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "may not be opened by this user, so it is foreign: remove it"
    ),
    **dict.fromkeys((errno.ELOOP, errno.ENOTDIR), "is a symbolic link or not a folder: remove it"),
    **dict.fromkeys((errno.ENXIO, errno.ENODEV, errno.EISDIR), "is not a plain file: remove it"),
}


def _checked(descriptor: int, path: Path, kind: Callable[[int], bool], forbidden: int) -> int:
    try:
        _refuse(path, reason_against(os.fstat(descriptor), kind, forbidden))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse(path: Path, reason: str) -> None:
    if reason:
        raise UntrustedFileError(f"{path} {reason}")


def read_file(path: Path, limit: int = 64 << 20) -> bytes:
    """The content of a small file of this user's; as ``open_file``, ``limit`` bytes at most."""
    with open(open_file(path), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise UntrustedFileError(f"{path} has more than {limit} bytes: it is not ours; remove it")
    return raw


def is_there(path: Path) -> bool:
    """True if a file is there, even if another machine has just made it."""
    # Not exists(): a network file system may remember for long that a name is not there, but
    # asks its server when a folder is opened.
    return path.parent.is_dir() and path.name in os.listdir(path.parent)


def replace_file(path: Path, content: bytes, *, durable: bool = False, mode: int = 0o600) -> None:
    """Replace a file by one with this content; a failure leaves the old one whole.

    With ``durable`` it is on stable storage on return.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    # Left by a writer that was killed: every file of ours has one writer.
    temporary.unlink(missing_ok=True)
    descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.rename(path)
    if durable:
        folder = open_folder(path.parent)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def rewrite_file(path: Path, content: bytes) -> None:
    """Like ``replace_file``, but without new space after the first time, for a full tmpfs.

    A spare of the same length next to it is written in place and takes its name.  The
    space that becomes free then is that of the next spare.  Line feeds fill the length up.
    """
    spare = spare_of(path)
    length = -(-max(len(content), 1) // SPARE_BYTES) * SPARE_BYTES
    _reserve(spare, length)
    descriptor = open_file(spare, os.O_WRONLY)
    with open(descriptor, "wb") as file:
        file.write(content.ljust(max(length, os.fstat(descriptor).st_size), b"\n"))
    spare.rename(path)
    # Without room for the next spare this content stays, and the next rewrite fails.
    with suppress(OSError):
        _reserve(spare, length)


def spare_of(path: Path) -> Path:
    """Path of the spare that ``rewrite_file`` keeps for a file."""
    return path.with_name(f".{path.name}.spare")


def _reserve(path: Path, length: int) -> None:
    try:
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
    except UntrustedFileError:
        # Nobody needs its content, so one with a wrong mode is made anew.
        if path.is_dir():
            raise
        path.unlink()
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, length)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file (flock(2)); False if another lock is in the way, OSError without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """False if the file was removed, or made anew, after it was opened."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def make_folder(folder: Path, forbidden: int = OTHERS, *, close: bool = False) -> None:
    """Have a folder of this user's, with mode 0700 if it is made, and its parents.

    One that is there is checked; with ``close`` one of this user's gets that mode, as it was
    perhaps made by hand.  UntrustedFileError for a link, a foreign one, or one that is open to
    others, and for links on the way there that somebody else has made.
    """
    check_way(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise UntrustedFileError(f"{folder} is not a folder: remove it") from None
    descriptor = open_folder(folder, 0 if close else forbidden)
    try:
        if close:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def make_node_folder(node_dir: Path) -> None:
    """Have the folder of a node, and those of all jobs and of this job above it."""
    for folder in (node_dir.parent.parent, node_dir.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
        _refuse(folder, reason_against_parent(folder.lstat()))
    make_folder(node_dir)


def check_way(path: Path) -> None:
    """UntrustedFileError if a component before the last is a link that somebody else made."""
    for one in reversed(path.absolute().parents):
        try:
            info = one.lstat()
        except OSError:
            return
        if stat.S_ISLNK(info.st_mode) and info.st_uid not in (os.geteuid(), 0):
            raise UntrustedFileError(
                f"{one} is a symbolic link that user {info.st_uid} made: {path} may lead anywhere; "
                "choose another directory"
            )


def check_folder(folder: Path, forbidden: int = OTHERS) -> None:
    """UntrustedFileError unless this is a folder of this user's; OSError if there is none."""
    check_way(folder)
    os.close(open_folder(folder, forbidden))


def check_socket(path: Path) -> None:
    """UntrustedFileError unless this is a socket of this user's in a folder of this user's.

    OSError if there is none.
    """
    check_folder(path.parent)
    _refuse(path, reason_against(path.lstat(), stat.S_ISSOCK))
