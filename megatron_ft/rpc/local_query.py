"""Questions to the SMPs of this machine over their Unix sockets."""

from __future__ import annotations

import glob
import os
import socket as unix
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from megatron_ft.core import private_files
from megatron_ft.core.environment import SOCKET_NAME
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
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
