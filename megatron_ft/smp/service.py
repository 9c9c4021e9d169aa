"""One SMP at work: it adopts a node's arenas, carries decisions out, and keeps the lease.

The SMP belongs to no trainer's process tree, is not an MPI process and has no CUDA context, so that
it and its arenas outlive whatever kills those.  It imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Collection
from typing import Any

import msgspec

from megatron_ft.arena import files
from megatron_ft.arena.arena import Arena
from megatron_ft.core import procfs
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ArenaError, ControlPlaneError, UntrustedFileError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import EventPublisher, Send
from megatron_ft.smp.effects import Effect, StorePermit, StoreSlot, ToCoordinator, ToTrainer
from megatron_ft.smp.heartbeats import NodeHeartbeats
from megatron_ft.smp.node_folder import STATE_NAME, NodeState, remove_node_dir
from megatron_ft.smp.processes import (
    DRAIN,
    STALL_SECONDS,
    WRITERS_NAME,
    Readers,
    Stalls,
    WriterProcess,
    Writers,
)
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.smp.store import ArenaStore, free, release
from megatron_ft.smp.survivors import Survivors

log = logging.getLogger(__name__)

KILL_TIMEOUT_SECONDS = 15.0

SIGTERM_REASON = "its SMP got SIGTERM"


class SmpService:
    """The state of one SMP: both servers (Unix socket and control plane) work on it.

    ``send_local`` reaches trainers and encoders, ``send_event`` the coordinator.
    """

    def __init__(
        self, environment: ProcessEnvironment, job: uuid.UUID, send_local: Send, send_event: Send
    ) -> None:
        self.environment = environment
        self.job = job
        self.machine = NodeMachine(environment.node)
        self.store = ArenaStore(environment.node_dir, job)
        self.writers = Writers(environment.node_dir, self._writer_gone)
        self.heartbeats = NodeHeartbeats(environment.node_dir, self.writers)
        self.survivors = Survivors(self.writers, environment.node_dir, send_local)
        self.readers = Readers(self.machine.reader_gone)
        self.stalls = Stalls()
        self.state = NodeState()
        self.retired = asyncio.Event()
        self.retiring = False
        self.retire_at = 0.0
        self.failure: BaseException | None = None
        self.lease_until = 0.0
        self._lease_begun = 0.0
        self.rewind: int | None = None
        self.evacuations: dict[str, m.Evacuate] = {}
        self.scrub_percent = 0.0
        self.scrub_counts = m.ScrubCounts()
        self.restore: m.RestoreReady | None = None
        self.restore_known = asyncio.Event()
        self.preparing: dict[str, bytes] = {}
        self.shortage = ""
        self._making: asyncio.Task[None] | None = None
        self._halted = False
        self.admitted = asyncio.Event()
        """Set, and replaced, when an incarnation has been admitted."""
        self.events = EventPublisher(
            self.machine.node,
            self.machine.shards,
            lambda: self.machine.highest_incarnation,
            send_event,
        )
        self.send_local = send_local
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Future[Any]] = set()

    # Start and end.

    def adopt(self) -> None:
        """Take over arenas and writers of an SMP that died here.

        If its files are damaged the writers are unknown: this node's memory is lost, and not the
        job's.
        """
        gone: list[WriterProcess] = []
        try:
            self.state = NodeState.load(self.environment.node_dir)
            gone = self.writers.adopt()
        except (ControlPlaneError, UntrustedFileError) as error:
            self.store.quarantine_all(str(error))
            for name in (STATE_NAME, WRITERS_NAME):
                files.remove(self.environment.node_dir / name)
        self.machine.highest_incarnation = self.state.highest_incarnation
        self.store.sanitize_files()
        self.store.adopt(self.machine)
        for writer in self.writers.all():
            self.enter(writer)
        for writer in gone:
            self.enter(writer)
            self._leave(writer)
        reach("adopt.writers")
        self.machine.adopted()
        reach("adopt.done")
        if self.store.arenas:
            log.info("adopted %d arenas: %s", len(self.store.arenas), ", ".join(self.store.arenas))

    def change_state(self, **changes: Any) -> None:
        """Store a state beyond the life of this process, before anything relies on it."""
        state = msgspec.structs.replace(self.state, **changes)
        state.save(self.environment.node_dir)
        self.state = state

    async def keep_only(self, decision: m.Adopt) -> None:
        """Free the arenas that a recovery does not keep; the memory is there when this returns.

        Outside of the event loop: small pages take some 0.2 s a GiB, and heartbeats continue.
        """
        await self.carry_out()  # Nothing is left to be stored in an arena that goes.
        await self.stop_making()
        damaged, gone = self.store.forget_damaged(), list[Arena]()
        if decision.sources == "return":
            gone += self.store.return_sources(decision.restore, self.machine)
        elif decision.sources == "drop":
            gone += self.store.drop_sources(self.machine)
        gone += self.store.keep_only(decision.keep, self.machine)
        await asyncio.to_thread(free, gone, damaged)
        if decision.sources == "return":
            await asyncio.to_thread(self.store.reserve)
            self.store.note_memory(self.machine)

    def make_memory(self) -> None:
        """Allocate slots that have no memory, once this node's trainers train.

        No restart waits for anything then.
        """
        short = [arena for arena in self.store.arenas.values() if arena.holes]
        begun = any(done >= 0 for done in self.store.progress().values())
        if short and begun and self._making is None:
            self._halted = False
            self._making = asyncio.create_task(self._make_memory(short))
            self.later(self._making)

    async def _make_memory(self, arenas: list[Arena]) -> None:
        """One arena after the other; what fails is tried again with the next heartbeat."""
        try:
            for arena in arenas:
                await asyncio.to_thread(
                    arena.complete, lambda: not (self._halted or self.retired.is_set())
                )
            self.shortage = ""
        except ArenaError as error:
            self.shortage = str(error)
            log.warning("memory of further slots: %s", error)
        except ValueError as error:
            log.info("memory of further slots: %s", error)  # an arena was closed
        self.store.note_memory(self.machine)
        self._making = None

    async def stop_making(self) -> None:
        self._halted = True
        if self._making is not None:
            await self._making

    async def set_aside(self, keep: Collection[SnapshotId]) -> None:
        """Make the arenas sources while trainers train, or free them if they came after others."""
        await self.carry_out()
        await self.stop_making()
        gone = self.store.give_way(self.machine) if self.store.sources else []
        # Trainers still map these: without a file their memory would stay until they do not.
        spent = [(arena, [*range(arena.geometry.slot_count)]) for arena in gone]
        spent += self.store.set_aside(keep, self.machine, same_layout=True)
        for arena, slots in spent:
            await asyncio.to_thread(release, arena, slots)
        await asyncio.to_thread(free, gone, ())

    async def tell_renewed(self) -> None:
        for writer in self.writers.all():
            path = self.machine.paths.get(writer.who)
            if writer.role == "trainer" and path is not None:
                await self.send_local((writer.identity,), m.Renewed(path))

    async def drop_sources(self) -> None:
        """Free the arenas of an older layout; a snapshot of the present one is as safe."""
        await asyncio.to_thread(free, self.store.drop_sources(self.machine), ())

    async def retire(self, *, remove_arenas: bool) -> None:
        """End this SMP: ``retired`` is set once the answer to the request has left."""
        await self.kill_writers(self.writers.all())
        await self.carry_out()
        await self.stop_making()
        self.retiring = True
        if remove_arenas:
            damaged = self.store.forget_damaged()
            await asyncio.to_thread(free, self.store.give_up(self.machine), damaged)
        asyncio.get_running_loop().call_later(0.05, self.retired.set)

    def later(self, work: Awaitable[Any]) -> None:
        """Run ``work`` as a task that is kept until it ends; an error in it ends this SMP.

        Its decisions may not be stored then.  The next SMP starts from the headers, and a peer
        that waits for an answer learns of the death at once.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.retired.set()

    def terminated(self) -> None:
        """SIGTERM: the node is about to go.  Its ranks move, where a supervisor has a spare.

        The memory stays until then: a scheduler may warn all nodes of a job, whose supervisor then
        drains it.
        """
        log.warning("SIGTERM: the supervisor is asked to evacuate node %s", self.machine.node)
        request = m.Evacuate(self.machine.node, uuid.uuid4().hex, SIGTERM_REASON)
        self.evacuations[request.node] = request

    # Writers and readers.

    def enter(self, writer: WriterProcess) -> None:
        if writer.role == "trainer":
            self.machine.trainer_joined(writer.who)
        elif writer.role == "encoder":
            self.machine.encoder_joined(writer.who)

    async def kill_writers(self, victims: list[WriterProcess]) -> None:
        """SIGKILL and wait; ControlPlaneError if one cannot be confirmed dead."""
        await self.writers.kill(victims, KILL_TIMEOUT_SECONDS)

    def _writer_gone(self, writer: WriterProcess) -> None:
        log.info("%s %s (pid %d) writes no more", writer.role, writer.who, writer.pid)
        self._leave(writer)
        self.later(self.carry_out())

    def _leave(self, writer: WriterProcess) -> None:
        self.preparing.pop(writer.who, None)
        if writer.role == "trainer":
            self.heartbeats.ended(writer)
            self.machine.trainer_gone(writer.who, writer.pid)
        elif writer.role == "encoder":
            self.machine.encoder_gone(writer.who, writer.pid)

    async def drop_stalled(self) -> None:
        """Drop the pins of readers that make no progress, and report them."""
        drains = {w.who: w.pid for w in self.writers.all() if w.role == DRAIN}
        now = time.monotonic()
        for name in self.stalls.poll({**self.readers.pids, **drains}, now):
            log.warning("reader %s has not run for %.0f s: its pin is dropped", name, STALL_SECONDS)
            self.readers.forget(name)
            self.machine.reader_gone(name)
            await self.events.publish(m.ReaderStalled(name, STALL_SECONDS))

    # The lease, and what an incarnation restores.

    def begin_lease(self, seconds: float) -> None:
        self._lease_begun = time.monotonic()
        self.lease_until = self._lease_begun + seconds

    def renew_lease(self, lease: m.Lease) -> None:
        """Count from the clock of the last answer that arrived; an older one renews nothing."""
        if lease.clock and self._lease_begun <= lease.clock <= time.monotonic():
            self._lease_begun = lease.clock
            self.lease_until = lease.clock + lease.seconds

    async def watch_lease(self) -> None:
        """Kill the node's writers when the lease has run out: the coordinator is out of reach.

        Where no supervisor has come to a job that ended, free its memory at the stated time.
        """
        while True:
            await asyncio.sleep(0.1)
            await self.drop_stalled()
            if 0 < self.retire_at < time.monotonic():
                log.info("no supervisor has come: this node's memory of the job is freed")
                self.retire_at = 0.0
                await self.retire(remove_arenas=True)
                remove_node_dir(self.environment.node_dir)
            writers = self.writers.running()
            if writers and self.lease_until and time.monotonic() > self.lease_until:
                log.error("the coordinator's lease has run out: killing %d writers", len(writers))
                await self.kill_writers(writers)

    # Effects.

    async def carry_out(self) -> None:
        """Perform effects in order: headers first, then the messages about them."""
        async with self._sending:
            for effect in self.machine.take_effects():
                await self._perform(effect)

    async def mend(self) -> None:
        """Have records that were damaged in memory written anew; after the changes under way."""
        await self.carry_out()
        if not self.machine.effects:
            self.store.mend(self.machine)

    def count_scrub(self, **more: int) -> None:
        changed = {name: getattr(self.scrub_counts, name) + n for name, n in more.items()}
        self.scrub_counts = msgspec.structs.replace(self.scrub_counts, **changed)

    async def _perform(self, effect: Effect) -> None:
        if isinstance(effect, StoreSlot | StorePermit):
            self.store.apply(effect)
        elif isinstance(effect, ToCoordinator):
            await self.events.publish(effect.body)
        else:
            if isinstance(effect, ToTrainer):
                writer = self.writers.find("trainer", effect.shard_id)
            else:
                writer = self.writers.find("encoder", self.machine.world)
            if writer is not None:
                await self.send_local((writer.identity,), effect.body)


def resident_bytes() -> int:
    """Memory of this process without the arenas: resident, less shared memory (proc(5))."""
    status = procfs.read_status("self")
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
