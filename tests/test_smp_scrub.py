"""The scrub beside requests that change what there is to read."""

from __future__ import annotations

import uuid
from pathlib import Path

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.environment import ProcessEnvironment
from megatron_ft.smp.host import NodeHost
from megatron_ft.smp.scrub import Scrub
from tests.smp_node import create, run, snapshot


class RemovesWhatFollows(Scrub):
    """While it reads one shard, a recovery removes all others from the node."""

    async def _slot(self, shard_id: str, slot: int) -> bool:
        self._host.store.keep_only([shard_id], self._host.machine)
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
        host.store.remove()


def test_arenas_that_the_last_request_removed_are_nothing_to_read(tmp_path: Path) -> None:
    """The store removes them at once; what the machine knows of slots stays to the end."""
    host = NodeHost(ProcessEnvironment("job", "node0", tmp_path, 1), uuid.UUID(int=7))
    arena = host.store.allocate(create())
    assert arena is not None
    host.store.enter(arena, host.machine)
    committed = SlotHeader(SlotState.COMMITTED, snapshot(1), 3)
    host.machine.shards["dp0"].slots[0] = committed
    host.store.remove()
    host.scrub_percent = 1.0
    scrub = Scrub(host)
    try:
        run(scrub._pass())
    finally:
        scrub.close()
    assert host.scrub_counts.bytes_read == 0
