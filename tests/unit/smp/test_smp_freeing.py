"""An SMP that gives memory back, which takes seconds where there is much of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys, Server
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.effects import StorePermit
from megatron_ft.smp.service import SmpService
from megatron_ft.smp.store import free
from megatron_ft.supervisor.smp_link import SmpLink
from tests.support.smp_node import SECRET, create, run, service

KEEPS_ONE = m.Adopt(1, (), None, ("dp0",))
ENDS = m.Retire(1, remove_arenas=True)
LET_GO_SECONDS = 20.0
"""A loop that waits for the lock itself is let go then, so that the test can say so."""


@asynccontextmanager
async def served(host: SmpService) -> AsyncIterator[SmpLink]:
    """The control plane of a node in this process, and a coordinator's link to it."""
    context, keys = zmq.asyncio.Context(), JobKeys.derive(SECRET)
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=keys)
    socket = Server(context, numbered=True)
    endpoint = keys.listen(socket.socket, "127.0.0.1")
    server = ControlServer(host, socket, lambda: None)
    serving = asyncio.create_task(server.serve())
    link = SmpLink(context, "node0", endpoint, keys, lambda event: None)
    try:
        yield link
    finally:
        link.close()
        serving.cancel()
        socket.socket.close(0)
        authenticator.stop()
        context.term()


@pytest.mark.parametrize("request_", [KEEPS_ONE, ENDS], ids=["others", "all"])
async def test_what_was_to_be_stored_is_stored_before_an_arena_goes(
    tmp_path: Path, request_: m.Message
) -> None:
    host = service(ProcessEnvironment("job", "node0", tmp_path, 1))
    arena = host.store.allocate(create("dp1"))
    assert arena is not None
    host.store.enter(arena, host.machine)
    host.machine.effects.append(StorePermit("dp1", None))
    if isinstance(request_, m.Adopt):
        await host.keep_only(request_)
    else:
        await host.retire(remove_arenas=True)
    await host.carry_out()
    assert "dp1" not in host.store.arenas


@pytest.mark.parametrize("request_", [KEEPS_ONE, ENDS], ids=["others", "all"])
def test_heartbeats_are_answered_while_memory_is_freed(tmp_path: Path, request_: m.Message) -> None:
    """The answer itself comes when the memory is there: the next arena is made of it."""
    host = service(ProcessEnvironment("job", "node0", tmp_path, 1))
    host.machine.highest_incarnation = 1
    for shard_id in ("dp0", "dp1"):
        arena = host.store.allocate(create(shard_id))
        assert arena is not None
        host.store.enter(arena, host.machine)
    # Whoever closes it waits, as for the pages of a large one.
    let_go = threading.Timer(LET_GO_SECONDS, arena._lock.release)

    async def story() -> m.Message:
        async with served(host) as link:
            freeing = asyncio.create_task(link.demand(request_, 60))
            while "dp1" in host.store.arenas and not freeing.done():
                await asyncio.sleep(0.01)
            beat = await link.demand(m.Lease(1, 60.0), 30)
            assert isinstance(beat, m.LeaseAnswer)
            assert arena.path.exists(), "nobody was heard of before the memory was free"
            assert not freeing.done()
            let_go.cancel()
            arena._lock.release()
            answer: m.Message = await freeing
            assert not arena.path.exists()
            return answer

    assert arena._lock.acquire(timeout=30)
    let_go.start()
    try:
        assert run(story()) == m.Ok()
    finally:
        let_go.cancel()
        free(host.store.give_up(host.machine), [])
