"""The SMP's end of the control plane: authenticated TCP, spoken by the coordinator only."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import zmq.asyncio

from megatron_ft.arena.numa import node_of_process
from megatron_ft.core.fault_points import reach
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys, Peer, Server, answered
from megatron_ft.smp.host import NodeHost, resident_bytes

FROM_COORDINATOR = (
    m.Adopt
    | m.CreateArena
    | m.ArenasReady
    | m.RestoreReady
    | m.Retire
    | m.Grant
    | m.Encode
    | m.Rebuild
    | m.Load
    | m.Repair
    | m.Commit
    | m.Abort
    | m.Hold
    | m.Unhold
    | m.StacksRequest
)


class ControlServer:
    """Serves one NodeHost to the coordinator."""

    def __init__(
        self, host: NodeHost, context: zmq.asyncio.Context, keys: JobKeys, address: str
    ) -> None:
        self._host = host
        self._busy = asyncio.Lock()
        self._server = Server(context, numbered=True, linger_ms=1000)
        self.socket = self._server.socket
        self.endpoint = keys.listen(self.socket, address)
        host.upward.send = self._send_event

    async def serve(self) -> None:
        """Answer until cancelled."""
        await self._server.serve(self._handle)

    async def _send_event(self, identity: bytes, body: m.Message) -> None:
        await self._server.send((identity, b""), body)

    async def _handle(self, peer: Peer, request: Any) -> m.Message | None:
        """Answer a heartbeat at once, so that a request that takes long is no silence."""
        if isinstance(request, m.Lease):
            return await self._lease(peer[0], request)
        self._host.later(self._answer(peer, request))
        return None

    async def _answer(self, peer: Peer, request: Any) -> None:
        """One request at a time."""
        async with self._busy:
            answer = await answered(self._decide(peer[0], request), request)
            await self._host.carry_out()
        assert answer is not None
        await self._server.send(peer, answer)

    async def _decide(self, identity: bytes, request: Any) -> m.Message:
        host = self._host
        if isinstance(request, m.Admit):
            return await self._admit(identity, request)
        if not isinstance(request, FROM_COORDINATOR):
            reason = f"{type(request).__name__} does not belong on the control plane"
            return m.Refused("ControlPlaneError", reason)
        highest = host.machine.highest_incarnation
        if getattr(request, "incarnation", None) != highest:
            reason = f"node {host.machine.node} is at incarnation {highest}"
            return m.Refused("StaleIncarnationError", reason)
        if isinstance(request, m.CreateArena):
            trainer = host.writers.find("trainer", request.shard_id)
            node = node_of_process(trainer.pid) if trainer else None
            arena = await asyncio.to_thread(host.store.allocate, request, node)
            if arena is not None:
                host.store.enter(arena, host.machine)
        elif isinstance(request, m.ArenasReady):
            await self._release_prepared(request)
        elif isinstance(request, m.RestoreReady):
            host.set_restore(request)
        elif isinstance(request, m.StacksRequest):
            return m.Stacks(host.machine.node, await host.watch.stacks(request.resume))
        elif isinstance(request, m.Retire):
            await host.retire(remove_arenas=request.remove_arenas)
        else:
            if isinstance(request, m.Grant):
                host.store.require_in_place()
            if isinstance(request, m.Adopt):
                await host.keep_only(request.keep)
                host.store.set_lineage(request.incarnation, request.lineage)
            return host.machine.handle(request)
        return m.Ok()

    async def _lease(self, identity: bytes, request: m.Lease) -> m.Message:
        host = self._host
        if request.incarnation != host.machine.highest_incarnation:
            return self._refuse_lease(request)
        host.upward.coordinator = identity
        host.renew_lease(request)
        host.summary |= request.summary
        host.scrub_percent = request.scrub_percent
        await host.upward.look(request)
        return m.LeaseAnswer(
            node=host.machine.node,
            paused=host.state.paused,
            progress=host.store.progress(),
            encoder_world=host.machine.world,
            resident_bytes=resident_bytes(),
            clock=time.monotonic(),
            pinned=host.machine.held_back(),
            rewind=host.rewind,
            pulses=host.watch.reports(),
            summary=m.summary_digests(host.summary),
            crowded=host.machine.crowded(),
            held=host.machine.held(),
        )

    def _refuse_lease(self, request: m.Lease) -> m.Message:
        highest = self._host.machine.highest_incarnation
        if request.incarnation < highest:
            return m.Refused(
                "StaleIncarnationError",
                f"node {self._host.machine.node} obeys incarnation {highest}",
            )
        return m.Refused(
            "ControlPlaneError", f"incarnation {request.incarnation} is not admitted yet"
        )

    async def _admit(self, identity: bytes, request: m.Admit) -> m.Message:
        """Fence: nothing of an older incarnation may write once this is answered."""
        host = self._host
        left = host.lease_until - time.monotonic()
        if left > 0 and identity != host.upward.coordinator:
            return m.Refused("LeaseHeld", f"{left:.3f}")
        highest = host.machine.highest_incarnation
        if request.incarnation <= highest:
            return m.Refused("StaleIncarnationError", f"incarnation {highest} was here already")
        host.keep_place()
        host.set_state(host.state.at(request.incarnation))
        reach("smp.admitting")
        while host.writers.all():
            await host.kill_writers(host.writers.all())
        if identity == host.upward.coordinator:
            host.rewind = None  # one that comes after may not have heard of it
        host.store.examine(host.machine)
        host.upward.coordinator = identity
        host.begin_lease(request.seconds)
        host.set_restore(None)
        host.preparing.clear()
        host.machine.admit(request.incarnation)
        host.upward.begin_incarnation()
        host.readers.forget_all()
        host.store.forget_progress()
        host.watch.sweep()
        reach("smp.admitted")
        return m.Inventory(
            node=host.machine.node,
            highest_incarnation=highest,
            arenas=host.store.reports(host.machine),
            damaged=tuple(host.store.damaged.values()),
            foreign=tuple(host.store.foreign),
        )

    async def _release_prepared(self, message: m.ArenasReady) -> None:
        host = self._host
        waiting, host.preparing = host.preparing, {}
        for shard_id, identity in waiting.items():
            if message.error:
                await host.send_local(identity, m.Refused(message.error, message.reason))
            else:
                await host.send_local(identity, m.Prepared(host.machine.paths[shard_id]))
