"""One node's machine, arenas and writers together, and the way from decisions to effects.

Both servers (the Unix socket's and the control plane's) work on one NodeHost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.arena import upkeep
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.core.fault_points import reach
from megatron_ft.rpc import messages as m
from megatron_ft.smp import state_file, writers
from megatron_ft.smp.node import NodeMachine
from megatron_ft.smp.node_shards import (
    Effect,
    MendSlot,
    StorePermit,
    StoreSlot,
    ToCoordinator,
    ToTrainer,
)
from megatron_ft.smp.readers import STALL_SECONDS, Readers, Stalls
from megatron_ft.smp.state_file import NodeState
from megatron_ft.smp.store import ArenaStore, free
from megatron_ft.smp.trainer_pulses import NodeWatch
from megatron_ft.smp.upward import SendTo, Upward
from megatron_ft.smp.writers import DRAIN, Writer, Writers

log = logging.getLogger(__name__)

KILL_TIMEOUT_SECONDS = 15.0


class NodeHost:
    """The state of one SMP.  ``send_local`` and ``upward.send`` are set by the servers."""

    def __init__(self, environment: ProcessEnvironment, job: uuid.UUID) -> None:
        self.environment = environment
        self.job = job
        self.machine = NodeMachine(environment.node)
        self.store = ArenaStore(environment.node_dir, job)
        self.writers = Writers(environment.node_dir, self._writer_died)
        self.watch = NodeWatch(environment.node_dir, self.writers)
        self.readers = Readers(self.machine.reader_gone)
        self.stalls = Stalls()
        self.state = NodeState()
        self.retired = asyncio.Event()
        self.failure: BaseException | None = None
        self.lease_until = 0.0
        self._heard = 0.0
        self.summary: dict[str, bytes] = {}
        self.rewind: int | None = None
        self.scrub_percent = 0.0
        self.scrub_counts = m.ScrubCounts()
        self.restore: m.RestoreReady | None = None
        self.told = asyncio.Event()
        self.preparing: dict[str, bytes] = {}
        self.keep_place: Callable[[], None] = lambda: None
        self.upward = Upward(self.machine)
        self.send_local: SendTo
        self._identities: dict[str, bytes] = {}
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Future[Any]] = set()

    def adopt(self) -> None:
        """Take over arenas and writers of an SMP that died here.

        If its notes are damaged nobody knows who may write here: this node's memory is lost, and
        not the job's.
        """
        gone: list[Writer] = []
        try:
            self.state = NodeState.load(self.environment.node_dir)
            gone = self.writers.adopt()
        except (ControlPlaneError, UntrustedFileError) as error:
            self.store.distrust_all(str(error))
            for name in (state_file.FILE_NAME, writers.FILE_NAME):
                upkeep.remove(self.environment.node_dir / name)
        self.machine.highest_incarnation = self.state.highest_incarnation
        self.store.put_right()
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

    def write_notes(self) -> None:
        """Write down what this SMP knows, in a folder that was made again."""
        self.state.save(self.environment.node_dir)
        self.writers.save()

    def set_state(self, state: NodeState) -> None:
        """Remember a state beyond the incarnation of this process, before anything relies on it."""
        state.save(self.environment.node_dir)
        self.state = state

    def enter(self, writer: Writer) -> None:
        """A writer is registered and watched."""
        self._identities[f"{writer.role} {writer.who}"] = writer.identity
        if writer.role == "trainer":
            self.machine.trainer_joined(writer.who)
        elif writer.role != DRAIN:
            self.machine.encoder_joined(writer.who)

    async def kill_writers(self, victims: list[Writer]) -> None:
        """SIGKILL and wait; ControlPlaneError if one cannot be confirmed dead."""
        await self.writers.kill(victims, KILL_TIMEOUT_SECONDS)

    def set_restore(self, ready: m.RestoreReady | None) -> None:
        """The coordinator has said what this incarnation restores; None before that."""
        self.restore = ready
        if ready is None:
            self.told.clear()
        else:
            self.told.set()

    async def carry_out(self) -> None:
        """Perform effects in order: headers first, then those who are told about them."""
        async with self._sending:
            for effect in self.machine.take_effects():
                await self._perform(effect)

    async def mend_records(self, shard_id: str) -> list[str]:
        """Write the shard's headers anew where a copy is damaged; names of those that were.

        After all effects that wait: what was decided is stored in its order.
        """
        async with self._sending:
            for effect in self.machine.take_effects():
                await self._perform(effect)
            slots = self.machine.shards.get(shard_id)
            if slots is None or shard_id not in self.store.arenas:
                # The last request may have removed the arenas while the scrub was under way.
                return []
            return self.store.mend_records(shard_id, slots.slots)

    def count_scrub(self, **more: int) -> None:
        """Add to what the scrub has done."""
        changed = {name: getattr(self.scrub_counts, name) + n for name, n in more.items()}
        self.scrub_counts = msgspec.structs.replace(self.scrub_counts, **changed)

    async def tell(self, body: Any) -> None:
        """Let the coordinator know, if one has been here."""
        await self.upward.tell(body)

    def later(self, work: Awaitable[Any]) -> None:
        """Run ``work`` as a task that is kept until it ends; a mistake of ours ends this SMP.

        What it had decided may not be stored.  The next SMP starts from the headers, and whoever
        waits for an answer hears of the death at once.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.retired.set()

    async def keep_only(self, shards: Collection[str]) -> None:
        """Free the arenas of all other shards; the memory is there when this returns.

        Beside the event loop: small pages take some 0.2 s a GiB, and heartbeats go on.
        """
        damaged = self.store.forget_damaged()
        await asyncio.to_thread(free, self.store.keep_only(shards, self.machine), damaged)

    async def retire(self, *, remove_arenas: bool) -> None:
        """End this SMP: ``retired`` is set once the answer to whoever asked has left."""
        await self.kill_writers(self.writers.all())
        self.keep_place = lambda: None
        if remove_arenas:
            damaged = self.store.forget_damaged()
            await asyncio.to_thread(free, self.store.give_up(), damaged)
        asyncio.get_running_loop().call_later(0.05, self.retired.set)

    async def drop_stalled(self) -> None:
        """Readers that do not get on hold no slot any more; the coordinator hears of them."""
        drains = {w.who: w.pid for w in self.writers.all() if w.role == DRAIN}
        for name in self.stalls.look({**self.readers.pids(), **drains}):
            log.warning("reader %s has not run for %.0f s: its pin is dropped", name, STALL_SECONDS)
            self.readers.forget(name)
            self.machine.reader_gone(name)
            await self.tell(m.ReaderStalled(name, STALL_SECONDS))

    def begin_lease(self, seconds: float) -> None:
        """A coordinator was admitted just now; nobody of an earlier incarnation writes any more."""
        self._heard = time.monotonic()
        self.lease_until = self._heard + seconds

    def renew_lease(self, lease: m.Lease) -> None:
        """Count from when the coordinator has heard of this node; what is older says nothing."""
        if lease.heard and self._heard <= lease.heard <= time.monotonic():
            self._heard = lease.heard
            self.lease_until = lease.heard + lease.seconds

    async def watch_lease(self) -> None:
        """A node that the coordinator cannot reach stops its own trainers."""
        while True:
            await asyncio.sleep(0.1)
            await self.drop_stalled()
            writers = self.writers.all()
            if writers and self.lease_until and time.monotonic() > self.lease_until:
                log.error("no word from the coordinator: killing %d writers", len(writers))
                await self.kill_writers(writers)

    def _writer_died(self, writer: Writer) -> None:
        log.info("%s %s (pid %d) is gone", writer.role, writer.who, writer.pid)
        self._leave(writer)
        self.later(self.carry_out())

    def _leave(self, writer: Writer) -> None:
        self._identities.pop(f"{writer.role} {writer.who}", None)
        self.preparing.pop(writer.who, None)
        if writer.role == "trainer":
            self.watch.ended(writer)
            self.machine.trainer_gone(writer.who, writer.pid)
        elif writer.role != DRAIN:
            self.machine.encoder_gone(writer.who, writer.pid)

    async def _perform(self, effect: Effect) -> None:
        if isinstance(effect, StoreSlot | StorePermit):
            self.store.apply(effect)
        elif isinstance(effect, MendSlot):
            await self._mend(effect)
        elif isinstance(effect, ToCoordinator):
            await self.tell(effect.body)
        elif isinstance(effect, ToTrainer):
            await self._send_writer(f"trainer {effect.shard_id}", effect.body)
        else:
            await self._send_writer(f"encoder {self.machine.world}", effect.body)

    async def _mend(self, effect: MendSlot) -> None:
        blocks = effect.blocks
        written = self.store.mend(effect)
        self.count_scrub(repaired_blocks=written)
        left = blocks.left + len(blocks.data) + len(blocks.parity) - written
        log.warning("%s: %d blocks repaired, %d left", effect.shard_id, written, left)
        await self.tell(m.Repaired(effect.shard_id, blocks.snapshot, written, left))

    async def _send_writer(self, key: str, body: m.Message) -> None:
        if key in self._identities:
            await self.send_local(self._identities[key], body)


def resident_bytes() -> int:
    """Memory of this process beside the arenas: resident, less shared memory (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
