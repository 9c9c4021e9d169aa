"""The Unix socket beside the arenas: trainers, encoders and the command line talk to the SMP."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.core import private_files
from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.rpc.message_base import MOST_BYTES

LONGEST_PATH = 107


def bind(context: zmq.asyncio.Context, path: Path) -> zmq.asyncio.Socket:
    """A ROUTER on a Unix socket that only the owner can open (mode 0600).

    A socket file that an earlier SMP left is replaced; the caller holds the folder's
    lock, so no live one is.  MissingEnvironmentError if the path is too long for the kernel,
    UntrustedFileError if the folder is not only this user's.
    """
    if len(str(path)) > LONGEST_PATH:
        raise MissingEnvironmentError(
            f"socket path {path} has {len(str(path))} characters, the kernel takes {LONGEST_PATH}: "
            "choose a shorter --arena-dir or job name"
        )
    private_files.check_folder(path.parent)
    path.unlink(missing_ok=True)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.maxmsgsize = MOST_BYTES
    listen(router, path)
    return router


def listen(router: zmq.asyncio.Socket, path: Path) -> None:
    """Make the socket's file, which only the owner can open."""
    old = os.umask(0o177)
    try:
        router.bind(f"ipc://{path}")
    finally:
        os.umask(old)


def connect(socket: zmq.Socket[Any], path: Path) -> None:
    """Connect to an SMP's socket; UntrustedFileError if it is not this user's alone.

    One that is not there yet is waited for, by ZeroMQ, in a folder that was checked.
    """
    with suppress(FileNotFoundError):
        private_files.check_socket(path)
    socket.connect(f"ipc://{path}")
