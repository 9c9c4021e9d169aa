"""The scrub beside requests that change what there is to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import seal
from megatron_ft.arena.format import BLOCK_BYTES, SlotHeader, SlotState
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.erasure.inspect_slot import Damage, SlotInspector
from megatron_ft.rpc import messages as m
from megatron_ft.smp import scrub as scrub_module
from megatron_ft.smp.scrub import Scrub
from megatron_ft.smp.service import SmpService
from megatron_ft.smp.store import free
from tests.support.smp_node import create, run, service, snapshot

LARGE_BYTES = 96 << 20
USED_BLOCKS = LARGE_BYTES // BLOCK_BYTES - 1
"""Of a slot that ``commit`` fills: nobody reads the padding behind its digest table."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SmpService]:
    """One SMP's state, without its servers."""
    host = service(ProcessEnvironment("job", "node0", tmp_path, 1))
    yield host
    free(host.store.give_up(host.machine), [])


def entered(host: SmpService, body: m.CreateArena) -> Arena:
    arena = host.store.allocate(body)
    assert arena is not None
    host.store.enter(arena, host.machine)
    return arena


def commit(host: SmpService, arena: Arena) -> None:
    """A sealed snapshot in slot 0 of dp0, with tensors in all of its memory but a block or two."""
    geometry = arena.geometry
    record = seal(
        arena.data(0, writable=True),
        shard_id="dp0",
        snapshot=snapshot(1),
        iteration=3,
        tensor_bytes=max(1000, geometry.data_bytes - 2 * geometry.block_bytes),
        meta=b"",
        layout_hash=bytes(32),
        block_bytes=geometry.block_bytes,
    )
    committed = SlotHeader(SlotState.COMMITTED, snapshot(1), 3, local_only=True, record=record)
    host.machine.shards["dp0"].slots[0] = committed


class RemovesWhatFollows(Scrub):
    """While it reads one shard, a recovery removes all others from the node."""

    async def _slot(self, shard_id: str, slot: int) -> bool:
        free(self._service.store.keep_only([shard_id], self._service.machine), [])
        return await super()._slot(shard_id, slot)


def test_a_shard_that_a_recovery_removes_meanwhile_is_passed_over(host: SmpService) -> None:
    for name in ("dp0", "dp1"):
        entered(host, create(name))
    host.scrub_percent = 1.0
    scrub = RemovesWhatFollows(host)
    try:
        run(scrub._pass())
        assert list(host.machine.shards) == ["dp0"]
    finally:
        scrub.close()


def test_arenas_that_the_last_request_removed_are_nothing_to_read(host: SmpService) -> None:
    """The store removes them at once; what the machine knows of slots stays to the end."""
    commit(host, entered(host, create()))
    free(host.store.give_up(host.machine), [])
    host.scrub_percent = 1.0
    scrub = Scrub(host)
    try:
        run(scrub._pass())
    finally:
        scrub.close()
    assert host.scrub_counts.bytes_read == 0


def test_damage_is_told_with_its_number_of_blocks(host: SmpService) -> None:
    arena = entered(host, create())
    commit(host, arena)
    arena.data(0, writable=True)[7] ^= 1
    told: list[Any] = []

    async def tell(body: Any) -> None:
        told.append(body)

    host.events.publish = tell  # type: ignore[method-assign]
    host.scrub_percent = 100.0
    scrub = Scrub(host)
    try:
        run(scrub._pass())
    finally:
        scrub.close()
    assert told == [m.BadBlocks("dp0", snapshot(1), 1)] and host.scrub_counts.bad_blocks == 1


@pytest.fixture
def large(host: SmpService) -> Iterator[Scrub]:
    """Of a host with a snapshot of many pieces, in blocks as arenas have them."""
    body = msgspec.structs.replace(create(), data_bytes=LARGE_BYTES, block_bytes=BLOCK_BYTES)
    commit(host, entered(host, body))
    host.scrub_percent = 100.0
    scrub = Scrub(host)
    yield scrub
    scrub.close()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    """Which pieces are read, in order."""
    found = Pieces()
    damage = SlotInspector.damage

    def recorded(inspector: SlotInspector, first: int, stop: int) -> Damage:
        found.seen.append((first, stop))
        found.at_each()
        return damage(inspector, first, stop)

    monkeypatch.setattr(SlotInspector, "damage", recorded)
    yield found


class Pieces:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.at_each: Callable[[], object] = lambda: None

    @property
    def blocks(self) -> list[int]:
        return [block for piece in self.seen for block in range(*piece)]


def test_a_slot_is_read_in_pieces(large: Scrub, pieces: Pieces) -> None:
    assert run(large._slot("dp0", 0))
    assert pieces.blocks == list(range(USED_BLOCKS))
    assert max(stop - first for first, stop in pieces.seen) * BLOCK_BYTES == (
        scrub_module.PIECE_BYTES
    )


def test_a_scrub_keeps_its_share_of_a_processor(large: Scrub, host: SmpService) -> None:
    """All of it, what the event loop does for it included."""
    host.scrub_percent = 4.0
    busy, taken = time.process_time(), time.monotonic()
    assert run(large._slot("dp0", 0))
    busy, taken = time.process_time() - busy, time.monotonic() - taken
    assert busy <= 1.5 * 0.04 * taken


def test_a_slot_that_is_given_away_is_read_no_further(
    large: Scrub, host: SmpService, pieces: Pieces
) -> None:
    """What is removed is freed when nobody reads it any more."""
    slots = host.machine.shards["dp0"].slots
    committed = slots[0]
    in_piece = scrub_module.PIECE_BYTES // BLOCK_BYTES
    last = 20 * in_piece

    def give_away() -> None:
        if pieces.seen[-1][0] == last:
            slots[0] = SlotHeader(SlotState.CAPTURING, snapshot(2), 4)

    pieces.at_each = give_away
    assert not run(large._slot("dp0", 0))
    assert pieces.blocks == list(range(last + in_piece))
    assert host.scrub_counts.bytes_read == last * BLOCK_BYTES
    # Whatever comes into the slot is read from there: where snapshots come often, all is read.
    slots[0], pieces.at_each = committed, lambda: None
    pieces.seen.clear()
    assert run(large._slot("dp0", 0))
    assert pieces.blocks == [*range(last, USED_BLOCKS), *range(last)]


@pytest.mark.parametrize("reason", ["closed", "switched off"])
def test_a_scrub_that_is_to_end_reads_no_further(
    large: Scrub, host: SmpService, pieces: Pieces, reason: str
) -> None:
    pieces.at_each = (
        large.close if reason == "closed" else partial(setattr, host, "scrub_percent", 0.0)
    )
    assert not run(large._slot("dp0", 0))
    assert len(pieces.seen) == 1


def test_damage_in_a_slot_that_is_given_away_after_its_reading_is_nobodys(
    large: Scrub, host: SmpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, in_thread = host.machine.shards["dp0"].slots, large._in_thread
    host.store.arenas["dp0"].data(0, writable=True)[7] ^= 1
    found: list[Damage] = []

    async def then_given_away(work: Callable[[], Any]) -> Any:
        result = await in_thread(work)
        if isinstance(result, tuple):
            found.append(result[0])
            slots[0] = SlotHeader(SlotState.CAPTURING, snapshot(2), 4)
        return result

    monkeypatch.setattr(large, "_in_thread", then_given_away)
    assert not run(large._slot("dp0", 0))
    assert found == [Damage(data=(0,))]
