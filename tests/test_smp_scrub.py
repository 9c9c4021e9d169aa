"""The scrub beside requests that change what there is to read."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.arena.digest import seal
from megatron_ft.arena.format import BLOCK_BYTES, SlotHeader, SlotState
from megatron_ft.environment import ProcessEnvironment
from megatron_ft.smp import messages as m
from megatron_ft.smp import scrub as scrub_module
from megatron_ft.smp.host import NodeHost
from megatron_ft.smp.message_base import MOST_BYTES
from megatron_ft.smp.scrub import Scrub
from megatron_ft.smp.store import free
from tests.smp_node import create, run, snapshot


class RemovesWhatFollows(Scrub):
    """While it reads one shard, a recovery removes all others from the node."""

    async def _slot(self, shard_id: str, slot: int) -> bool:
        free(self._host.store.keep_only([shard_id], self._host.machine))
        return await super()._slot(shard_id, slot)


def test_a_shard_that_a_recovery_removes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    host = NodeHost(ProcessEnvironment("job", "node0", tmp_path, 1), uuid.UUID(int=7))
    for name in ("dp0", "dp1"):
        arena = host.store.allocate(create(name))
        assert arena is not None
        host.store.enter(arena, host.machine)
    host.scrub_percent = 1.0
    scrub = RemovesWhatFollows(host)
    try:
        run(scrub._pass())
        assert list(host.machine.shards) == ["dp0"]
    finally:
        scrub.close()
        free(host.store.give_up())


def test_arenas_that_the_last_request_removed_are_nothing_to_read(tmp_path: Path) -> None:
    """The store removes them at once; what the machine knows of slots stays to the end."""
    host = NodeHost(ProcessEnvironment("job", "node0", tmp_path, 1), uuid.UUID(int=7))
    arena = host.store.allocate(create())
    assert arena is not None
    host.store.enter(arena, host.machine)
    committed = SlotHeader(SlotState.COMMITTED, snapshot(1), 3)
    host.machine.shards["dp0"].slots[0] = committed
    free(host.store.give_up())
    host.scrub_percent = 1.0
    scrub = Scrub(host)
    try:
        run(scrub._pass())
    finally:
        scrub.close()
    assert host.scrub_counts.bytes_read == 0


class GivesTheSlotAway(Scrub):
    """Between its look at all blocks and its second one at bad ones, another snapshot comes."""

    given: Callable[[], None] = staticmethod(lambda: None)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        if isinstance(work, partial) and work.func is scrub_module._again:
            self.given()
        return await super()._in_thread(work)


@pytest.mark.parametrize("given_away", [True, False])
def test_damage_of_a_slot_that_was_given_away_is_nobodys(tmp_path: Path, given_away: bool) -> None:
    """Its repair would be refused, which ends the encoders of the whole job."""
    host = NodeHost(ProcessEnvironment("job", "node0", tmp_path, 1), uuid.UUID(int=7))
    arena = host.store.allocate(create())
    assert arena is not None
    host.store.enter(arena, host.machine)
    data = arena.data(0, writable=True)
    record = seal(
        data,
        shard_id="dp0",
        snapshot=snapshot(1),
        iteration=3,
        tensor_bytes=1000,
        meta=b"",
        layout_hash=bytes(32),
        block_bytes=arena.geometry.block_bytes,
        algorithm=arena.header.digest_algorithm,
    )
    data[7] ^= 1
    slots = host.machine.shards["dp0"].slots
    slots[0] = SlotHeader(SlotState.COMMITTED, snapshot(1), 3, local_only=True, record=record)
    told: list[Any] = []

    async def tell(body: Any) -> None:
        told.append(body)

    host.tell = tell  # type: ignore[method-assign]
    host.scrub_percent = 100.0
    scrub = GivesTheSlotAway(host)
    if given_away:
        scrub.given = lambda: slots.__setitem__(0, SlotHeader(SlotState.CAPTURING, snapshot(2), 4))
    try:
        run(scrub._pass())
    finally:
        scrub.close()
        free(host.store.give_up())
    assert told == [m.BadBlocks("dp0", snapshot(1), (0,), ())] * (not given_away)


def test_what_a_repair_sends_back_is_a_message() -> None:
    """The blocks of one report in arenas as they are made, with as much room for all else."""
    assert 2 * scrub_module.MOST_LISTED * BLOCK_BYTES <= MOST_BYTES
