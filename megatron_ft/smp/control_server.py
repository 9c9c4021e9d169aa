"""Requests of the coordinator to an SMP, over authenticated TCP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from megatron_ft.arena.limits import memory_readings
from megatron_ft.core import private_files, procfs
from megatron_ft.core.environment import IMPORTS_NAME
from megatron_ft.core.errors import (
    UNREADABLE,
    ControlPlaneError,
    StaleIncarnationError,
    TransitionRefusedError,
)
from megatron_ft.core.fault_points import reach
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Peer, Server, answered
from megatron_ft.smp.service import SmpService
from megatron_ft.smp.state_machine import ORDERS


class ControlServer:
    """Serves one SmpService to the coordinator on ``server``, which is bound by the caller.

    ``keep_folder`` is called before an incarnation is admitted.
    """

    def __init__(
        self, service: SmpService, server: Server, keep_folder: Callable[[], None]
    ) -> None:
        self._service, self._server, self._keep_folder = service, server, keep_folder
        self._busy = asyncio.Lock()

    async def serve(self) -> None:
        await self._server.serve(self._handle)

    async def _handle(self, peer: Peer, request: Any) -> m.Message | None:
        """Answer a heartbeat at once, even while a request takes long."""
        if isinstance(request, m.Lease):
            return await self._lease(peer[0], request)
        self._service.later(self._answer(peer, request))
        return None

    async def _answer(self, peer: Peer, request: Any) -> None:
        """Carry out one request at a time."""
        async with self._busy:
            answer = await answered(self.decide(peer[0], request), request)
            await self._service.carry_out()
        assert answer is not None
        await self._server.send(peer, answer)

    async def decide(self, identity: bytes, request: Any) -> m.Message:
        service = self._service
        if isinstance(request, m.Admit):
            return await self._admit(identity, request)
        kind = type(request)
        if kind not in ORDERS and kind not in _REQUESTS:
            raise ControlPlaneError(f"{kind.__name__} does not belong on the control plane")
        service.machine.check_incarnation(request)
        if kind in _REQUESTS:
            return await _REQUESTS[kind](self, request) or m.Ok()
        if isinstance(request, m.Grant):
            if missing := service.store.missing():
                then = "no snapshot is taken before the job's next start, which rebuilds it"
                raise ControlPlaneError(f"{missing}: {then}")
            if request.stay:
                return await self._grant_stay(request)
        if isinstance(request, m.Adopt):
            await service.keep_only(request)
            service.store.set_lineage(request.incarnation, request.lineage)
        answer = service.machine.handle(request)
        if isinstance(request, m.Commit) and service.store.outlives_sources(request):
            await service.carry_out()
            await service.drop_sources()
        return answer

    async def _make_sources(self, request: m.MakeSources) -> None:
        await self._service.stop_making()
        self._service.store.make_sources(request.snapshot, self._service.machine)

    async def _check_room(self, request: m.CheckRoom) -> None:
        self._service.store.check_room(request.spared, request.room)

    async def _read_room(self, request: m.RoomRequest) -> m.Room:
        readings = memory_readings(self._service.store.directory)
        tightest = min(readings, key=lambda reading: reading.available_bytes)
        return m.Room(tightest.available_bytes, tightest.limit, procfs.machine())

    async def _grant_stay(self, request: m.Grant) -> m.Message:
        """Permit a snapshot whose boundary trainers must not leave; refused if one has passed it.

        A rank that has not seen the permit there would wait in the next iteration for those that
        stay behind.
        """
        answer = self._service.machine.handle(request)
        await self._service.carry_out()  # trainers publish their progress before they read permits
        late = [
            s for s, done in self._service.store.progress().items() if done >= request.iteration
        ]
        if isinstance(answer, m.Ok) and late:
            text = f"{', '.join(late)} had passed iteration {request.iteration}"
            raise TransitionRefusedError(text)
        return answer

    async def _create_arena(self, request: m.CreateArena) -> None:
        service = self._service
        arena = await asyncio.to_thread(service.store.allocate, request)
        if arena is not None:
            service.store.enter(arena, service.machine)

    async def _arenas_ready(self, request: m.ArenasReady) -> None:
        service = self._service
        waiting, service.preparing = service.preparing, {}
        for shard_id, identity in waiting.items():
            answer: m.Message
            if request.error:
                answer = m.Refused(request.error)
            else:
                answer = self._prepared(shard_id)
            await service.send_local((identity,), answer)

    def _prepared(self, shard_id: str) -> m.Prepared:
        """The arena of a shard, with what was reshaped into it unless trainers have declined."""
        service, path = self._service, self._service.machine.paths[shard_id]
        slots = service.machine.shards[shard_id].slots
        if service.restore is not None and service.restore.reshaped:
            for slot, header in enumerate(slots):
                if header.record is not None:
                    return m.Prepared(path, slot, header.record)
        return m.Prepared(path)

    async def _restore_ready(self, request: m.RestoreReady) -> None:
        self._service.restore = request
        self._service.restore_known.set()

    async def _stacks(self, request: m.StacksRequest) -> m.Message:
        return m.Stacks(await self._service.heartbeats.stacks())

    async def _read_imports(self, request: m.ImportsRequest) -> m.Message:
        try:
            noted = private_files.read_file(self._service.store.directory / IMPORTS_NAME)
            return m.Imports(request.incarnation, msgspec.json.decode(noted, type=tuple[str, ...]))
        except (OSError, *UNREADABLE) as error:
            raise ControlPlaneError(f"no modules of a trainer are known: {error}") from error

    async def _note_imports(self, request: m.Imports) -> None:
        path = self._service.store.directory / IMPORTS_NAME
        private_files.rewrite_file(path, msgspec.json.encode(request.modules))

    async def _retire(self, request: m.Retire) -> None:
        if request.seconds:
            self._service.retire_at = time.monotonic() + request.seconds
        else:
            await self._service.retire(remove_arenas=request.remove_arenas)

    async def _lease(self, identity: bytes, request: m.Lease) -> m.Message:
        """Renew the coordinator's lease; the answer is what it learns with each heartbeat."""
        service, machine = self._service, self._service.machine
        highest = machine.highest_incarnation
        if request.incarnation < highest:
            raise StaleIncarnationError(f"node {machine.node} obeys incarnation {highest}")
        if request.incarnation > highest:
            raise ControlPlaneError(f"incarnation {request.incarnation} is not admitted yet")
        service.events.coordinator = identity
        service.renew_lease(request)
        service.scrub_percent = request.scrub_percent
        await service.events.on_heartbeat(request)
        service.make_memory()
        service.later(service.mend())
        missing = service.store.missing()
        return m.LeaseAnswer(
            node=machine.node,
            paused=service.state.paused,
            progress=service.store.progress(),
            encoder_world=machine.world,
            clock=time.monotonic(),
            pinned=machine.held_back(),
            rewind=service.rewind,
            heartbeats=service.heartbeats.reports(),
            crowded=machine.crowded(),
            held=() if missing else machine.held(),
            evacuations=tuple(service.evacuations.values()),
            unmade=machine.unmade(),
            shortage=service.shortage,
            missing=missing,
            readers=tuple(machine.readers()),
            hanging=tuple(writer.who for writer in service.writers.hanging()),
        )

    async def _admit(self, identity: bytes, request: m.Admit) -> m.Message:
        """Fence: nothing of an older incarnation may write once this is answered."""
        service, machine = self._service, self._service.machine
        left = service.lease_until - time.monotonic()
        if left > 0 and identity != service.events.coordinator:
            return m.LeaseHeld(left)
        highest = machine.highest_incarnation
        if request.incarnation <= highest:
            raise StaleIncarnationError(f"incarnation {highest} was here already")
        service.retire_at = 0.0
        self._keep_folder()
        service.change_state(highest_incarnation=request.incarnation)
        reach("smp.admitting")
        kept = await service.survivors.let_go(request.incarnation, request.survivors)
        while older := [w for w in service.writers.running() if w.pid not in kept.values()]:
            await service.kill_writers(older)
        if identity == service.events.coordinator:
            service.rewind = None  # a coordinator that comes after may not have received it
        else:
            service.evacuations.clear()
        await service.carry_out()  # so that the machine knows no more than headers say
        service.store.examine(machine)
        service.events.coordinator = identity
        service.begin_lease(request.seconds)
        service.restore_known.clear()
        service.preparing.clear()
        machine.admit(request.incarnation)
        service.events.begin_incarnation()
        for reader in list(service.readers.pids):
            service.readers.forget(reader)
        service.store.forget_progress()
        service.heartbeats.begin_incarnation()
        service.admitted.set()
        service.admitted = asyncio.Event()
        reach("smp.admitted")
        return m.Inventory(
            node=machine.node,
            highest_incarnation=highest,
            arenas=service.store.reports(machine),
            damaged=tuple(service.store.damaged.values()),
            foreign=tuple(service.store.foreign),
            kept=tuple(kept),
            renewed=service.survivors.renewed,
            sources=service.store.source_reports(),
            hanging=tuple(writer.who for writer in service.writers.hanging()),
        )


_REQUESTS: dict[type[m.Message], Callable[[ControlServer, Any], Any]] = {
    m.CreateArena: ControlServer._create_arena,
    m.MakeSources: ControlServer._make_sources,
    m.CheckRoom: ControlServer._check_room,
    m.RoomRequest: ControlServer._read_room,
    m.SetAside: lambda server, request: server._service.set_aside(request.spared),
    m.TellRenewed: lambda server, _: server._service.tell_renewed(),
    m.ArenasReady: ControlServer._arenas_ready,
    m.RestoreReady: ControlServer._restore_ready,
    m.ReenterRanks: lambda server, request: server._service.survivors.reenter(request),
    m.StacksRequest: ControlServer._stacks,
    m.ImportsRequest: ControlServer._read_imports,
    m.Imports: ControlServer._note_imports,
    m.Retire: ControlServer._retire,
}
"""Requests of the coordinator that are not orders to the state machine."""
