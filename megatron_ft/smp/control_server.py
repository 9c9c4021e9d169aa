"""The SMP's end of the control plane: authenticated TCP, spoken by the coordinator only."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.arena.numa import node_of_process
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.fault_points import reach
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.job_summary import digests
from megatron_ft.rpc.message_base import MOST_BYTES
from megatron_ft.rpc.security import JobKeys
from megatron_ft.smp.host import NodeHost, resident_bytes
from megatron_ft.smp.local_server import refusal, unexpected

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
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 1000
        self.socket.maxmsgsize = MOST_BYTES
        keys.protect_server(self.socket)
        self.socket.bind(f"tcp://{address}:*")
        host.upward.send = self._send_event

    @property
    def endpoint(self) -> str:
        """Where it listens, as ``tcp://address:port``."""
        return bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            frames = await self.socket.recv_multipart()
            if len(frames) != 3:
                continue
            identity, correlation, frame = frames
            try:
                request = m.decode(frame)
            except MegatronFTError as error:
                await self._reply(identity, correlation, refusal(error))
                continue
            if isinstance(request, m.Lease):
                await self._reply(identity, correlation, self._lease(identity, request))
                await self._host.upward.look(request)
            else:
                self._host.later(self._answer(identity, correlation, request))

    async def _send_event(self, identity: bytes, body: m.Message) -> None:
        await self._reply(identity, b"", body)

    async def _reply(self, identity: bytes, correlation: bytes, body: m.Message) -> None:
        await self.socket.send_multipart([identity, correlation, m.encode(body)])

    async def _answer(self, identity: bytes, correlation: bytes, request: Any) -> None:
        """One request at a time; heartbeats overtake, so that a long one is no silence."""
        answer: m.Message
        async with self._busy:
            try:
                answer = await self._decide(identity, request)
            except MegatronFTError as error:
                answer = refusal(error)
            except Exception as error:
                answer = unexpected(request, error)
            await self._host.carry_out()
        await self._reply(identity, correlation, answer)

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

    def _lease(self, identity: bytes, request: m.Lease) -> m.Message:
        host = self._host
        if request.incarnation != host.machine.highest_incarnation:
            return self._refuse_lease(request)
        host.upward.coordinator = identity
        host.renew_lease(request)
        host.summary |= request.summary
        host.scrub_percent = request.scrub_percent
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
            summary=digests(host.summary),
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
