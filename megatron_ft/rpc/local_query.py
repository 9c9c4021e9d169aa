"""Requests of short-lived processes to the SMPs of this machine, over their Unix sockets.

The command line asks, readers pin a snapshot while they read it, and a process that writes to
disk for the supervisor registers itself, so that the SMP ends it in time.
"""

from __future__ import annotations

import glob
import os
import socket as unix
import struct
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Connection


def sockets(root: Path, job: str | None) -> Iterator[Path]:
    """Sockets of SMPs under ``root``, of the job of exactly this name, or of all jobs: None."""
    jobs = "*" if job is None else glob.escape(job)
    yield from sorted(root.glob(f"{jobs}/*/{SOCKET_NAME}") if jobs else ())


def has_listener(path: Path) -> bool:
    """True if a process serves this socket; UntrustedFileError if it is not this user's alone."""
    # ZeroMQ would try until the timeout: it cannot know that nothing will ever listen there.
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
    """Refuse a listener of another user, which the kernel names (SO_PEERCRED, unix(7))."""
    raw = probe.getsockopt(unix.SOL_SOCKET, unix.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.geteuid():
        raise UntrustedFileError(
            f"{path} is served by a process of user {uid}: it is no SMP of this job; remove it"
        )


def ask(socket_path: Path, request: m.Message, timeout_seconds: float = 5.0) -> Any:
    """The answer of one SMP; ControlPlaneError at once if none listens there, else in time.

    UntrustedFileError, with nothing sent, if the socket is not this user's alone.
    """
    if not has_listener(socket_path):
        raise ControlPlaneError(f"no SMP listens at {socket_path}: it is dead")
    with Connection(socket_path) as smp:
        smp.send(request)
        try:
            return smp.receive(timeout_seconds)
        except TimeoutError:
            reason = f"no SMP answers at {socket_path}: it is dead or stopped"
            raise ControlPlaneError(reason) from None


@contextmanager
def pinned(folders: Iterable[Path], snapshot: SnapshotId) -> Iterator[None]:
    """Hold ``snapshot`` on every node of ``folders`` whose SMP runs, until the context ends.

    If one SMP refuses, the pins on those asked before are released:
    SnapshotUnavailableError, or ControlPlaneError for one that does not answer.
    """
    reader = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    asked: list[Path] = []
    try:
        for folder in folders:
            if has_listener(folder / SOCKET_NAME):
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
        if has_listener(folder / SOCKET_NAME):
            raise
        # It has died since it was looked for: its arenas are read like those of a stopped job.
        return
    if isinstance(answer, m.Refused):
        raise SnapshotUnavailableError(
            f"snapshot {request.snapshot} cannot be held in {folder}: {answer.reason}"
        )


def register_leased_process(what: str) -> None:
    """Have this process ended with the lease of the incarnation that has started it.

    It may write to a disk that other nodes share, where the next incarnation writes too.
    StaleIncarnationError when that incarnation is over.  Without an SMP or a supervisor nothing is
    done: there is no lease that could end.
    """
    try:
        environment = ProcessEnvironment.from_env()
    except NotUnderSupervisorError:
        return
    if not has_listener(environment.socket):
        return
    request = m.LeasedProcess(f"{what}-{os.getpid()}", os.getpid(), environment.incarnation)
    answer = ask(environment.socket, request, 30.0)
    if isinstance(answer, m.Refused):
        stale = isinstance(answer.error, StaleIncarnationError)
        kind = StaleIncarnationError if stale else ControlPlaneError
        raise kind(f"{what} on node {environment.node} must not begin: {answer.reason}")
