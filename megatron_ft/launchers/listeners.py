"""Takes the listening sockets of an MPI launcher off the network.

PRRTE, Open MPI's launcher, binds them to all interfaces; no setting of its own changes that
(``create_listen`` in its ``oob_tcp_listener.c``), and it asks who connects for no secret.  Where
all ranks are on one machine nobody needs to: each socket is borrowed and bound to the loopback
device.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_ft.core import procfs

LOOPBACK = b"lo\0"
LONGEST_SECONDS = 10.0
"""A launcher that does not listen by then is not looked at any more."""

_LOOK_SECONDS = 0.01
_PIDFD_GETFD = 438  # On all architectures of Linux but alpha; Python has no name for it.
_LISTENS = "0A"


def keep_to_loopback(pid: int) -> threading.Thread:
    """Bind what ``pid``, a child of this process, will listen on to loopback; in a thread.

    Without the right to (Linux before 5.7, some containers) everything stays as it is.
    """
    thread = threading.Thread(
        target=_keep, args=(pid, os.pidfd_open(pid)), name=f"listeners of {pid}", daemon=True
    )
    thread.start()
    return thread


def _keep(pid: int, pidfd: int) -> None:
    looks, after = int(LONGEST_SECONDS / _LOOK_SECONDS), 10
    try:
        # Sockets are made one right after the other: a few looks more after the first.
        while looks > 0 and after > 0 and not procfs.ended(pidfd, _LOOK_SECONDS):
            looks -= 1
            with suppress(FileNotFoundError, ProcessLookupError):
                after -= bool(bind_all(pid, pidfd))
    except OSError:
        return  # Not allowed: see docs/security.md.
    finally:
        os.close(pidfd)


def bind_all(pid: int, pidfd: int) -> int:
    """Bind to loopback all that ``pid`` listens on at all interfaces; how many those are."""
    found = 0
    for number, inode in open_to_all(pid):
        with borrowed(pidfd, number) as listener:
            if os.fstat(listener.fileno()).st_ino == inode:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK)
                found += 1
    return found


def open_to_all(pid: int) -> Iterator[tuple[int, int]]:
    """Number and inode of each TCP socket on which a process listens at no address in particular.

    Also those that are bound to a device.
    """
    inodes = set(_listening(pid))
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            kind, _, inode = os.readlink(link).partition(":[")
            if kind == "socket" and int(inode[:-1]) in inodes:
                yield int(link.name), int(inode[:-1])


def borrowed(pidfd: int, number: int) -> socket.socket:
    """A descriptor of ours for another process's socket; PermissionError, or OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _listening(pid: int) -> Iterator[int]:
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # No IPv6.
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and not words[1].partition(":")[0].strip("0"):
                    yield int(words[9])
