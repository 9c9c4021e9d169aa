"""The SMP process: sockets and timers around one NodeHost.

It belongs to no trainer's process tree, is no MPI process and has no CUDA context, so
whatever kills those leaves it and its arenas.  It imports no torch.

Keeps the place of a living SMP: folder, lock, notes and socket come back if they are removed.

The SMP alone knows who writes to its arenas and what it was told, so it stays.  Arenas whose
files are gone cannot come back: the next admission counts them as lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.core import private_files
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.host import NodeHost
from megatron_ft.smp.local_server import LocalServer
from megatron_ft.smp.ownership import PID_NAME, is_at, make_node_dir, own
from megatron_ft.smp.scrub import Scrub

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

SLURM_JOB = "slurm-job"
"""Holds the number of the Slurm job that a node's folder is of, for scripts/slurm/epilog.sh."""


class NodePlace:
    """A node's folder and its lock, which this process holds for as long as it lives."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory, self._job = directory, job
        self._lock: BinaryIO | None = None

    def take(self, *, send_away: bool = True) -> None:
        """Make the folder and hold its lock; errors as of ``own``."""
        directory = self.directory
        make_node_dir(directory)
        number = os.environ.get("SLURM_JOB_ID")
        if number is not None:
            private_files.rewrite_file(directory / SLURM_JOB, number.encode())
        self.close()
        self._lock = own(directory, self._job, send_away=send_away)

    def whole(self) -> bool:
        """Whether folder and lock are where they were."""
        return self._lock is not None and is_at(self._lock, self.directory)

    def close(self) -> None:
        """Let the lock go."""
        if self._lock is not None:
            self._lock.close()


class Keeper:
    """Looks after the place of one SMP: once a second, and before each incarnation."""

    def __init__(self, host: NodeHost, local: LocalServer, place: NodePlace) -> None:
        self._host, self._local, self._place = host, local, place
        host.keep_place = self.look

    async def run(self) -> None:
        """Look until cancelled.  Where nothing can be made this SMP ends, and is replaced."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._host.keep_place()

    def look(self) -> None:
        """Make again what is missing."""
        whole = self._place.whole()
        if not whole:
            log.error("%s was removed: it is made again", self._place.directory)
            self._place.take(send_away=False)
            self._host.write_notes()
            write_pid(self._place.directory)
        if not whole or not self._local.in_place():
            log.error("the socket in %s was removed: it is made again", self._place.directory)
            self._local.bind_again()


def write_pid(directory: Path) -> None:
    """Say which process the SMP of this folder is."""
    private_files.rewrite_file(directory / PID_NAME, str(os.getpid()).encode())


class Credentials(msgspec.Struct, frozen=True):
    """What an SMP reads from its standard input: never an argument, never a variable."""

    job: str
    secret: bytes


async def run(
    environment: ProcessEnvironment,
    credentials: Credentials,
    address: str,
    announce: Callable[[str], None],
    place: NodePlace,
) -> None:
    """Adopt what is in the node's folder and serve until the job retires this SMP.

    ``announce`` gets the endpoint of the control plane once it is served; ``place`` is held.
    """
    host = NodeHost(environment, uuid.UUID(credentials.job))
    host.adopt()
    keys = JobKeys.derive(credentials.secret)
    context = zmq.asyncio.Context()
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=keys)
    local = LocalServer(host, context)
    control = ControlServer(host, context, keys, address)
    scrub, keeper = Scrub(host), Keeper(host, local, place)
    announce(control.endpoint)
    try:
        loops = (local.serve(), control.serve(), host.watch_lease(), scrub.run(), keeper.run())
        await _until(host.retired, *loops)
        if host.failure is not None:
            raise host.failure
    finally:
        scrub.close()
        authenticator.stop()
        local.socket.close()
        control.socket.close()
        context.term()


async def _until(event: asyncio.Event, *loops: Coroutine[Any, Any, Any]) -> None:
    """Run endless loops until the event; if one of them fails, its exception is raised."""
    tasks = [asyncio.ensure_future(loop) for loop in (event.wait(), *loops)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()
