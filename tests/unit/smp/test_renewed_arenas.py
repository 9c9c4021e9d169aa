"""Arenas that are set aside while trainers train, and the larger ones that come beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.arena import limits
from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ArenaMemoryError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.procfs import machine
from megatron_ft.rpc import messages as m
from megatron_ft.smp import control_server
from megatron_ft.smp import store as store_module
from megatron_ft.smp.effects import StoreSlot
from megatron_ft.smp.service import SmpService
from tests.support.arena_samples import make_record
from tests.support.smp_node import create, service
from tests.unit.smp.test_sources import LINEAGE, arenas, ask

PROTECTED, LOCAL, NEWER = SnapshotId(1, 4), SnapshotId(1, 5), SnapshotId(1, 6)
SHARDS = ("dp0", "dp1")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SmpService]:
    """A node whose two shards have a protected snapshot, a newer local one, and a free slot."""
    tmp_path.chmod(0o700)
    host = service(ProcessEnvironment("job", "node0", tmp_path, 1))
    host.machine.highest_incarnation = 1
    for shard_id in SHARDS:
        make(host, shard_id)
        for slot, (snapshot, local) in enumerate(((PROTECTED, False), (LOCAL, True))):
            hold(host, shard_id, slot, snapshot, local=local)
            host.store.arenas[shard_id].data(slot, writable=True)[:] = 1 + slot
        host.store.arenas[shard_id].data(2, writable=True)[:] = 9
        host.store.arenas[shard_id].write_progress(57)
    yield host
    for arena in [*host.store.arenas.values(), *host.store.sources.values()]:
        arena.close()


def make(host: SmpService, shard_id: str, data_bytes: int = 131072) -> None:
    arena = host.store.allocate(create(shard_id, slots=3, data_bytes=data_bytes))
    assert arena is not None
    host.store.enter(arena, host.machine)


def hold(host: SmpService, shard_id: str, slot: int, snapshot: SnapshotId, *, local: bool) -> None:
    record = make_record(shard_id=shard_id, snapshot=snapshot, iteration=snapshot.sequence)
    header = SlotHeader(
        SlotState.COMMITTED, snapshot, snapshot.sequence, record=record, local_only=local
    )
    host.machine.shards[shard_id].slots[slot] = header
    host.store.apply(StoreSlot(shard_id, slot, header))


def held(host: SmpService) -> list[tuple[SnapshotId, bool]]:
    return [(one.snapshot, one.protected) for one in host.machine.held()]


def enlarge(host: SmpService) -> None:
    assert isinstance(ask(host, m.SetAside(1, (PROTECTED, LOCAL))), m.Ok)
    for shard_id in SHARDS:
        make(host, shard_id, 262144)


def test_the_newest_snapshots_stay_and_count_until_a_newer_one_is_as_safe(host: SmpService) -> None:
    both = [(LOCAL, False), (PROTECTED, True)]
    assert held(host) == both
    ask(host, m.SetAside(1, (PROTECTED, LOCAL)))
    assert held(host) == both and not host.machine.shards
    for shard_id in SHARDS:
        make(host, shard_id, 262144)
        assert held(host) == both
        source = host.store.sources[shard_id]
        assert (source.data(0) == 1).all() and (source.data(1) == 2).all()
        assert not source.data(2).any(), "a slot of nothing gives its memory back"
        assert host.store.arenas[shard_id].progress() == 57, "permits follow what was reached"
        hold(host, shard_id, 0, NEWER, local=True)
    assert held(host) == [(NEWER, False), *both]
    assert arenas(host) == ["dp0.arena", "dp0.source", "dp1.arena", "dp1.source"]


def test_arenas_that_are_outgrown_before_their_first_commit_are_replaced(host: SmpService) -> None:
    enlarge(host)
    before = host.store.arenas["dp0"]
    before.data(0, writable=True)[:] = 5
    before.write_progress(61)
    ask(host, m.SetAside(1, (PROTECTED, LOCAL)))
    assert arenas(host) == ["dp0.source", "dp1.source"]
    make(host, "dp0", 524288)
    assert host.store.arenas["dp0"].progress() == 61
    assert (host.store.sources["dp0"].data(0) == 1).all()


def test_the_memory_of_what_gives_way_is_free_while_a_trainer_maps_it(host: SmpService) -> None:
    enlarge(host)
    arena = host.store.arenas["dp0"]
    view = arena.data(0)
    arena.data(0, writable=True)[:] = 5
    ask(host, m.SetAside(1, (PROTECTED, LOCAL)))
    assert not view.any()


def test_without_room_nothing_changes(host: SmpService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots that are not kept count for the room, and holes in them do not."""
    span = host.store.arenas["dp0"].geometry.slot_span
    asked: list[int] = []

    def check(directory: Path, need_bytes: int, arithmetic: str) -> None:
        asked.append(need_bytes)
        limits.check_memory(directory, need_bytes, arithmetic)

    monkeypatch.setattr(store_module, "check_memory", check)
    before = arenas(host)
    assert isinstance(ask(host, m.CheckRoom(1, (PROTECTED, LOCAL), 10 * span)), m.Ok)
    assert isinstance(ask(host, m.CheckRoom(1, (PROTECTED,), 10 * span)), m.Ok)
    assert asked == [10 * span - 2 * span, 10 * span - 4 * span]
    with pytest.raises(ArenaMemoryError, match=r"a state that has grown.*leaves"):
        ask(host, m.CheckRoom(1, (PROTECTED, LOCAL), 1 << 60))
    assert arenas(host) == before and held(host)[0] == (LOCAL, False)


def test_sources_return_to_trainers_that_never_left_them(host: SmpService) -> None:
    """The files are the same, so that mappings stay good."""
    view = host.store.arenas["dp0"].data(0)
    enlarge(host)
    ask(host, m.Adopt(1, LINEAGE[:1], LOCAL, SHARDS, "return"))
    assert arenas(host) == ["dp0.arena", "dp1.arena"]
    assert held(host) == [(LOCAL, False), (PROTECTED, True)]
    host.store.arenas["dp0"].data(0, writable=True)[:] = 77
    assert (view == 77).all() and host.store.arenas["dp0"].holes == 0


def test_a_node_says_what_its_tightest_limit_leaves(
    host: SmpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = [limits.MemoryReading("the tmpfs", 70), limits.MemoryReading("a cgroup", 50)]
    monkeypatch.setattr(control_server, "memory_readings", lambda folder: readings)
    room = ask(host, m.RoomRequest(1))
    assert (room.available, room.limit) == (50, "a cgroup") and room.machine == machine()
