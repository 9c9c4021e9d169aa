"""Asks the SMPs of this node, and pins a snapshot while it is read.

Questions to the SMPs of this machine over their Unix sockets.

Pinning a snapshot with the SMPs of this machine, for as long as it is read.

A process that acts for the supervisor on a node tells the SMP there, which ends it in time.
"""

from __future__ import annotations

import glob
import os
import socket
import socket as unix
import struct
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from megatron_ft.core import private_files
from megatron_ft.core.environment import SOCKET_NAME, ProcessEnvironment
from megatron_ft.core.errors import (
    ControlPlaneError,
    NotUnderSupervisorError,
    SnapshotUnavailableError,
    StaleIncarnationError,
    UntrustedFileError,
)
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import local_socket
from megatron_ft.rpc import messages as m


def sockets(root: Path, job: str | None) -> Iterator[Path]:
    """Sockets of SMPs under ``root``, of the job of exactly this name, or of all jobs: None."""
    jobs = "*" if job is None else glob.escape(job)
    yield from sorted(root.glob(f"{jobs}/*/{SOCKET_NAME}") if jobs else ())


def has_listener(path: Path) -> bool:
    """Whether a process serves this socket; UntrustedFileError if it is not this user's alone."""
    # ZeroMQ would go on trying until the timeout: it cannot know that nobody will come.
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            private_files.check_socket(path)
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
        _check_peer(probe, path)
    return True


def _check_peer(probe: unix.socket, path: Path) -> None:
    """Who listens is told by the kernel (SO_PEERCRED, unix(7)), whatever the file says."""
    raw = probe.getsockopt(unix.SOL_SOCKET, unix.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.geteuid():
        raise UntrustedFileError(
            f"{path} is served by a process of user {uid}: it is no SMP of this job; remove it"
        )


def ask(socket_path: Path, request: m.Message, timeout_seconds: float = 5.0) -> Any:
    """The answer of one SMP; ControlPlaneError at once if nobody listens there, else in time.

    UntrustedFileError, with nothing sent, if the socket is not this user's alone.
    """
    if not has_listener(socket_path):
        raise ControlPlaneError(f"no SMP listens at {socket_path}: it is dead")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        local_socket.connect(socket, socket_path)
        socket.send(m.encode(request))
        if not socket.poll(int(timeout_seconds * 1000)):
            raise ControlPlaneError(f"no SMP answers at {socket_path}: it is dead or stopped")
        return m.decode(socket.recv())
    finally:
        socket.close()
        context.term()


@contextmanager
def pinned(folders: Iterable[Path], snapshot: SnapshotId) -> Iterator[None]:
    """Hold ``snapshot`` on every node of ``folders`` whose SMP runs, until the context ends.

    If one SMP refuses, those asked before are told that nobody reads:
    SnapshotUnavailableError, or ControlPlaneError for one that does not answer.
    """
    reader = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    asked: list[Path] = []
    try:
        for folder in folders:
            if serves(folder / SOCKET_NAME):
                asked.append(folder)
                _pin(folder, m.Pin(reader, snapshot, os.getpid()))
        yield
    finally:
        for folder in asked:
            # An SMP that is gone by now has taken its pins with it.
            with suppress(ControlPlaneError):
                ask(folder / SOCKET_NAME, m.Unpin(reader))


def _pin(folder: Path, request: m.Pin) -> None:
    try:
        answer = ask(folder / SOCKET_NAME, request)
    except ControlPlaneError:
        if serves(folder / SOCKET_NAME):
            raise
        # It has died since it was looked for: its arenas are read like those of a stopped job.
        return
    if isinstance(answer, m.Refused):
        raise SnapshotUnavailableError(
            f"snapshot {request.snapshot} cannot be held in {folder}: {answer.reason}"
        )


def serves(path: Path) -> bool:
    """Whether somebody listens on a Unix socket; one that is merely stopped does, too."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def begin_errand(what: str) -> None:
    """From here on this process is ended with the lease of the incarnation that has started it.

    It may write to a disk that other nodes share, where the next incarnation writes too.
    StaleIncarnationError when that incarnation is over.  Without an SMP, or a supervisor, there is
    nobody to ask and none whose lease could end.
    """
    try:
        environment = ProcessEnvironment.from_env()
    except NotUnderSupervisorError:
        return
    if not serves(environment.socket):
        return
    errand = m.Errand(f"{what}-{os.getpid()}", os.getpid(), environment.incarnation)
    answer = ask(environment.socket, errand, 30.0)
    if isinstance(answer, m.Refused):
        kind = StaleIncarnationError if "Stale" in answer.error else ControlPlaneError
        raise kind(f"{what} on node {environment.node} must not begin: {answer.reason}")
