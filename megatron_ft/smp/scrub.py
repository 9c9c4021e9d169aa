"""The scrub: reads committed snapshots again, unhurried, and reports damage.

Memory that is not read can go bad unnoticed until it is needed.  So the SMP reads what
is committed over and over: digests are computed in a thread, a piece at a time, and
after each piece it sleeps for as long as its share of a processor demands.  The share
makes it unimportant, and not a lower priority: a thread that is put aside while it holds
the interpreter's lock would hold up the event loop.  Headers are looked at in between: a slot
that was given to a new snapshot meanwhile proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import ArenaError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.erasure.inspect_slot import Damage, SlotInspector
from megatron_ft.erasure.member import code_of, member_of
from megatron_ft.rpc import messages as m
from megatron_ft.smp.service import SmpService

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
IDLE_SECONDS = 1.0
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
        if whole and self._next:
            self._service.count_scrub(passes=1)
        self._next = {k: at for k, at in self._next.items() if k[0] in shards}

    async def _slot(self, shard_id: str, slot: int) -> bool:
        """Read one slot from where its last reading stopped, all around; whether it was whole.

        A slot that holds nothing committed has nothing to be read, so it is whole.
        """
        header = self._committed(shard_id, slot)
        if header is None:
            return True
        arena = self._service.store.arenas[shard_id]
        start = self._next.get((shard_id, slot), 0)

        def stays() -> bool:
            return self._committed(shard_id, slot) == header

        damage, end, size = await self._in_thread(
            partial(self._read, arena, slot, header, start, stays)
        )
        self._service.count_scrub(bytes_read=size)
        self._next[shard_id, slot] = start if end is None else end
        if end is not None or not stays():
            return False
        await self._report(shard_id, header, damage)
        return True

    def _read(
        self, arena: Arena, slot: int, header: SlotHeader, start: int, stays: Callable[[], bool]
    ) -> tuple[Damage, int | None, int]:
        """In the thread: the damage, and how many bytes were read.

        In between, the piece from which it resumes, where it was given up; None if it was not.
        """
        code, member = code_of(arena.header), member_of(arena, slot, header)
        inspector = SlotInspector(code, member, parity=header.parity_valid)
        size, total = arena.geometry.block_bytes, inspector.blocks
        step = max(1, PIECE_BYTES // size)
        damage, length = Damage(), 0
        for first in (*range(start, total, step), *range(0, start, step)):
            stop = min(first + step, start if first < start else total)
            damage |= inspector.damage(first, stop)
            self._rest()
            if self._closed.is_set() or self._service.scrub_percent <= 0 or not stays():
                return damage, first, length
            length += (stop - first) * size
        return damage, None, length

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
        await self._service.events.publish(m.BadBlocks(shard_id, header.snapshot, len(damage)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _rest(self) -> None:
        """In the thread: rest until our share of a processor is kept."""
        busy = time.thread_time() - self._rested
        percent = min(max(self._service.scrub_percent, 0.01), 100.0)
        self._closed.wait(busy * (100.0 / percent - 1))
        self._rested = time.thread_time()
