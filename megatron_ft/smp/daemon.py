"""The SMP process: sockets and timers around one NodeHost.

It belongs to no trainer's process tree, is no MPI process and has no CUDA context, so
whatever kills those leaves it and its arenas.  It imports no torch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc.security import JobKeys
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.host import NodeHost
from megatron_ft.smp.keeper import Keeper, NodePlace
from megatron_ft.smp.local_server import LocalServer
from megatron_ft.smp.scrub import Scrub


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
