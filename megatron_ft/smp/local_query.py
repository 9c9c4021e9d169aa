"""Questions to the SMPs of this machine over their Unix sockets."""

from __future__ import annotations

import socket as unix
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from megatron_ft.environment import SOCKET_NAME
from megatron_ft.errors import ControlPlaneError
from megatron_ft.smp import messages as m


def sockets(root: Path, job: str | None) -> Iterator[Path]:
    """Sockets of SMPs under ``root``, of one job or of all."""
    yield from sorted(root.glob(f"{job or '*'}/*/{SOCKET_NAME}"))


def _has_listener(path: Path) -> bool:
    # ZeroMQ would go on trying until the timeout: it cannot know that nobody will come.
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


def ask(socket_path: Path, request: m.Message, timeout_seconds: float = 5.0) -> Any:
    """The answer of one SMP; ControlPlaneError at once if nobody listens there, else in time."""
    if not _has_listener(socket_path):
        raise ControlPlaneError(f"no SMP listens at {socket_path}: it is dead")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(f"ipc://{socket_path}")
        socket.send(m.encode(request))
        if not socket.poll(int(timeout_seconds * 1000)):
            raise ControlPlaneError(f"no SMP answers at {socket_path}: it is dead or stopped")
        return m.decode(socket.recv())
    finally:
        socket.close()
        context.term()
