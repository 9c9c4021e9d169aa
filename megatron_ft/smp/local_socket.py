"""The Unix socket beside the arenas: trainers, encoders and the command line talk to the SMP."""

from __future__ import annotations

import os
from pathlib import Path

import zmq
import zmq.asyncio

from megatron_ft.errors import MissingEnvironmentError

LONGEST_PATH = 107


def bind(context: zmq.asyncio.Context, path: Path) -> zmq.asyncio.Socket:
    """A ROUTER on a Unix socket that only the owner can open (mode 0600).

    A socket file that an earlier SMP left is replaced; the caller holds the folder's
    lock, so no live one is.  MissingEnvironmentError if the path is too long for the kernel.
    """
    if len(str(path)) > LONGEST_PATH:
        raise MissingEnvironmentError(
            f"socket path {path} has {len(str(path))} characters, the kernel takes {LONGEST_PATH}: "
            "choose a shorter --arena-dir or job name"
        )
    path.unlink(missing_ok=True)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    old = os.umask(0o177)
    try:
        router.bind(f"ipc://{path}")
    finally:
        os.umask(old)
    return router
