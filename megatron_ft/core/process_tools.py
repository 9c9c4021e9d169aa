"""Tools for starting processes: free ports, the ends of logs, work outside of the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
BELOW = range(15000, 30000)
"""Ports above most registered services and below the node ports of Kubernetes."""

TRIES = 50


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that was free on ``address`` just now; somebody else may take it meanwhile.

    It is below the range of ip_local_port_range (ip(7)), of which any connection takes one.  Ask
    for a new one at every start: the old one may linger in TIME_WAIT.
    """
    ports = range(0)
    with suppress(OSError, ValueError):
        ports = range(BELOW.start, min(BELOW.stop, int(EPHEMERAL.read_text().split()[0])))
    # Not the generator of module random: its state may be somebody's training.
    named = [secrets.choice(ports) for _ in range(TRIES)] if ports else []
    return next(filter(None, (_bound(address, port) for port in [*named, 0])))


def _bound(address: str, port: int) -> int | None:
    """The port, or for 0 one that the kernel chooses; None if it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            if port == 0:
                raise
            return None
        bound: int = probe.getsockname()[1]
        return bound


_TAIL_BYTES = 1 << 16
"""Most bytes read of a log: one may have gigabytes, and its reader also renews leases."""

_NO_REASON = (
    *("srun: error: ", "srun: launch/slurm: ", "-----"),
    *("Process name:", "Exit code:", "mpirun detected", "prterun detected"),
)
"""Prefixes of lines that srun and mpirun add to a log: they do not say why a process ended."""


def last_lines(path: Path, count: int = 15) -> str:
    """The last ``count`` lines, of at most 64 KiB; a note if the log cannot be read."""
    try:
        return "\n".join(tail(path)[-count:])
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"


def log_size(path: Path) -> int:
    """Bytes in a log, 0 if there is none: a process that starts now writes from there on."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_word(path: Path, since: int = 0) -> str:
    """The last line that the process itself probably wrote.

    With ``since`` only what follows that byte counts: earlier processes wrote the rest.
    """
    try:
        lines = tail(path, since)
    except OSError:
        return last_lines(path)
    if since and not lines:
        return f"it wrote nothing to {path}"
    own = [line for line in lines if line and not line.lstrip().startswith(_NO_REASON)]
    return (own or lines or [""])[-1]


def tail(path: Path, since: int = 0) -> list[str]:
    """The last lines behind byte ``since``, of at most 64 KiB; OSError."""
    with path.open("rb") as file:
        file.seek(max(since, path.stat().st_size - _TAIL_BYTES))
        # mpirun ends its reports with a zero byte.
        return file.read(_TAIL_BYTES).replace(b"\0", b"").decode(errors="replace").splitlines()


Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], seconds: float) -> Result:
    """The result of ``work``, or asyncio.TimeoutError after ``seconds``; it is left to itself then.

    Not in the loop's executor: the program could not end before a disk that hangs.
    """
    done: futures.Future[Result] = futures.Future()

    def run() -> None:
        with suppress(futures.InvalidStateError):
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

    threading.Thread(target=run, name="in-thread", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(done), seconds)


def carried(text: str) -> str:
    """An argument, path or variable for another machine: its bytes, one letter each.

    Both machines may decode in other ways, and it may contain bytes that are not text.
    """
    return os.fsencode(text).decode("latin-1")


def received(text: str) -> str:
    """The text that ``carried`` was given, as this machine decodes them."""
    return os.fsdecode(text.encode("latin-1"))
