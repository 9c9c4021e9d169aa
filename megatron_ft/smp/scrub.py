"""The scrub: reads committed snapshots again, unhurried, and reports damage.

Memory that is not read can go bad unnoticed until it is needed.  So the SMP reads what
is committed over and over: digests are computed in a thread, a piece at a time, and
after each piece it sleeps for as long as its share of a processor demands.  The share
makes it unimportant, and not a lower priority: a thread that is put aside while it holds
the interpreter's lock would hold up the event loop.  That one only starts runs of many
pieces, as to start one costs it more than a piece's digests, and looks at headers in
between: a slot that was given to a new snapshot meanwhile proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import ArenaError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.erasure.block_repair import Damage, SlotInspector
from megatron_ft.erasure.member import code_of, member_of
from megatron_ft.rpc import messages as m
from megatron_ft.smp.service import SmpService

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
RUN_BYTES = 32 << 20
"""Bytes that the thread reads before it returns to the event loop."""
IDLE_SECONDS = 1.0
MOST_LISTED = 64
"""Bad blocks in one report: what a repair sends back must stay a message, not a shard."""
REPEAT_SECONDS = 5.0
"""Damage that stays is reported again after this long: a new coordinator may not know of it."""
MOST_REMEMBERED = 64

T = TypeVar("T")


class Scrub:
    """Reads one node's committed slots in turn; counts in ``service.scrub_counts``."""

    def __init__(self, service: SmpService) -> None:
        self._service = service
        self._next: dict[tuple[str, int], int] = {}
        self._said: dict[tuple[str, SnapshotId], tuple[Damage, float]] = {}
        self._thread = ThreadPoolExecutor(1, "megatron-ft-scrub")
        self._closed = threading.Event()
        # Of the thread's processor time: what it had used when it last rested.
        self._rested = 0.0

    async def run(self) -> None:
        """Scrub until cancelled.  An error is logged and never ends the SMP."""
        while True:
            before = self._service.scrub_counts.bytes_read
            try:
                await self._pass()
            except (ArenaError, ValueError, OSError) as error:
                log.warning("scrub interrupted: %s", error)
            if self._service.scrub_counts.bytes_read == before:
                await asyncio.sleep(IDLE_SECONDS)

    def close(self) -> None:
        """Stop without waiting: the piece that is being read ends by itself."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _pass(self) -> None:
        """Everything that is committed now, once."""
        shards = self._service.machine.shards
        whole = bool(shards)
        for shard_id in sorted(shards):
            # A recovery may have removed it while another one was read.
            there = shards.get(shard_id)
            for slot in range(0 if there is None else len(there.slots)):
                if self._service.scrub_percent <= 0:
                    return
                whole &= await self._slot(shard_id, slot)
            if shard_id in shards:
                # Its records are few and small, so they are looked at in every pass.
                await self._records(shard_id)
        if whole and self._next:
            self._service.count_scrub(passes=1)
        self._next = {k: at for k, at in self._next.items() if k[0] in shards}

    async def _records(self, shard_id: str) -> None:
        damaged = await self._service.mend_records(shard_id)
        for name in damaged:
            log.warning("%s of %s: a copy was damaged and is written anew", name, shard_id)
        if damaged:
            self._service.count_scrub(records=len(damaged))

    async def _slot(self, shard_id: str, slot: int) -> bool:
        """Read one slot from where its last reading stopped, all around; whether it was whole.

        A slot that holds nothing committed has nothing to be read, so it is whole.
        """
        header = self._committed(shard_id, slot)
        if header is None:
            return True
        arena = self._service.store.arenas[shard_id]
        size = arena.geometry.block_bytes
        inspector = await self._in_thread(partial(_inspector, arena, slot, header))
        start, total = self._next.get((shard_id, slot), 0), inspector.blocks
        step, run = (max(1, length // size) for length in (PIECE_BYTES, RUN_BYTES))

        def is_committed() -> bool:
            return self._committed(shard_id, slot) == header

        damage, done = Damage(), 0
        while done < total:
            first = (start + done) % total
            stop = min(first + run, total, first + total - done)
            pieces = [range(at, min(at + step, stop)) for at in range(first, stop, step)]
            found, end = await self._in_thread(partial(self._read, inspector, pieces, is_committed))
            self._service.count_scrub(bytes_read=(end - first) * size)
            if end < stop or not is_committed():
                self._next[shard_id, slot] = end % total
                return False
            damage, done = damage | found, done + stop - first
        self._next[shard_id, slot] = start
        if damage:
            # Looked at once more: it may have been repaired since it was read.
            again = await self._in_thread(partial(_again, arena, slot, header, damage))
            if self._committed(shard_id, slot) != header:
                return False
            await self._report(shard_id, header, again)
        return True

    def _read(
        self, inspector: SlotInspector, pieces: Sequence[range], go_on: Callable[[], bool]
    ) -> tuple[Damage, int]:
        """Read in pieces in the thread, with rests; the damage, and the block to continue from.

        That block is the first of the piece in which it was given up, or the one behind all.
        """
        damage = Damage()
        for piece in pieces:
            damage |= self._paced(partial(inspector.damage, piece.start, piece.stop))
            if self._closed.is_set() or self._service.scrub_percent <= 0 or not go_on():
                return damage, piece.start
        return damage, pieces[-1].stop

    def _committed(self, shard_id: str, slot: int) -> SlotHeader | None:
        """The slot's header if a snapshot is committed there: no process may write to it."""
        slots = self._service.machine.shards.get(shard_id)
        if slots is None or shard_id not in self._service.store.arenas:
            # The last request may have removed the arenas while the scrub was under way.
            return None
        header = None if slot >= len(slots.slots) else slots.slots[slot]
        return header if header is not None and header.state == SlotState.COMMITTED else None

    async def _report(self, shard_id: str, header: SlotHeader, damage: Damage) -> None:
        assert header.snapshot is not None
        known, said = self._said.get((shard_id, header.snapshot), (Damage(), -math.inf))
        fresh = len(damage | known) - len(known)
        if not damage or (not fresh and time.monotonic() < said + REPEAT_SECONDS):
            return
        if len(self._said) >= MOST_REMEMBERED:
            self._said.pop(next(iter(self._said)))
        self._said[shard_id, header.snapshot] = damage | known, time.monotonic()
        self._service.count_scrub(bad_blocks=fresh)
        log.error("%s of snapshot %s has bad blocks: %s", shard_id, header.snapshot, damage)
        data = damage.data[:MOST_LISTED]
        parity = damage.parity[: MOST_LISTED - len(data)]
        more = len(damage) - len(data) - len(parity)
        await self._service.events.emit(m.BadBlocks(shard_id, header.snapshot, data, parity, more))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """The result of ``work``, paced."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._paced, work)

    def _paced(self, work: Callable[[], T]) -> T:
        """In the thread: run ``work``, then rest until our share of a processor is kept."""
        started = time.monotonic()
        result = work()
        # All that the thread has done since it last rested, to come back from that included.
        busy, self._rested = time.thread_time() - self._rested, time.thread_time()
        percent = min(max(self._service.scrub_percent, 0.01), 100.0)
        self._closed.wait(max(0.0, busy * 100.0 / percent - (time.monotonic() - started)))
        return result


def _inspector(arena: Arena, slot: int, header: SlotHeader) -> SlotInspector:
    member = member_of(arena, slot, header)
    return SlotInspector(code_of(arena.header), member, parity=header.parity_valid)


def _again(arena: Arena, slot: int, header: SlotHeader, damage: Damage) -> Damage:
    """The part of some damage that is still there."""
    inspector = _inspector(arena, slot, header)
    numbers = [*damage.data, *(inspector.data_blocks + block for block in damage.parity)]
    found = Damage()
    for number in numbers:
        found |= inspector.damage(number, number + 1)
    return found
