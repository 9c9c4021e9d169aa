"""Arenas of an older layout, out of which encoders make shards of the present one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.effects import StoreSlot, ToCoordinator, ToEncoder
from megatron_ft.smp.service import SmpService
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.smp.store import ArenaStore
from tests.support.arena_samples import make_record
from tests.support.smp_node import create, service

OLD, NEW = SnapshotId(1, 4), SnapshotId(2, 0)
LINEAGE = (Ancestor(1, None), Ancestor(2, OLD))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SmpService]:
    """A node that holds ``dp0`` and ``dp1`` of snapshot OLD, in incarnation 2."""
    tmp_path.chmod(0o700)
    host = service(ProcessEnvironment("job", "node0", tmp_path, 2))
    host.machine.highest_incarnation = 2
    for shard_id in ("dp0", "dp1"):
        make(host, shard_id)
        hold(host, shard_id, OLD)
    yield host
    for arena in [*host.store.arenas.values(), *host.store.sources.values()]:
        arena.close()


def make(host: SmpService, shard_id: str) -> None:
    arena = host.store.allocate(create(shard_id, incarnation=2))
    assert arena is not None
    host.store.enter(arena, host.machine)


def hold(host: SmpService, shard_id: str, snapshot: SnapshotId) -> None:
    record = make_record(shard_id=shard_id, snapshot=snapshot, iteration=40)
    header = SlotHeader(SlotState.COMMITTED, snapshot, 40, record=record, local_only=True)
    host.machine.shards[shard_id].slots[0] = header
    host.store.apply(StoreSlot(shard_id, 0, header))


def ask(host: SmpService, request: m.Message) -> m.Message:
    server: Any = None
    return asyncio.run(ControlServer(host, server, lambda: None).decide(b"", request))


def names(host: SmpService) -> list[str]:
    return sorted(p.name for p in host.store.directory.iterdir() if p.suffix != ".msgpack")


def arenas(host: SmpService) -> list[str]:
    return [name for name in names(host) if name.endswith((".arena", ".source"))]


def adopt(sources: m.Sources, *keep: str) -> m.Adopt:
    return m.Adopt(2, LINEAGE, OLD, keep, sources)


def reshaping(host: SmpService) -> None:
    """The new layout has one shard here, of the same name as an old one."""
    assert isinstance(ask(host, m.MakeSources(2, OLD)), m.Ok)
    assert not host.machine.shards
    make(host, "dp0")


def test_arenas_of_the_new_layout_come_beside_the_old_ones(host: SmpService) -> None:
    reshaping(host)
    assert arenas(host) == ["dp0.arena", "dp0.source", "dp1.source"]
    assert {r.shard_id for r in host.store.source_reports()} == {"dp0", "dp1"}
    assert all(r.slots[0].snapshot == OLD for r in host.store.source_reports())
    assert host.store.reports(host.machine)[0].slots[0].snapshot is None


def test_an_smp_that_comes_after_knows_which_are_sources(host: SmpService) -> None:
    reshaping(host)
    store, machine = ArenaStore(host.store.directory, host.job), NodeMachine("node0")
    store.sanitize_files()
    store.adopt(machine)
    assert list(machine.shards) == ["dp0"] and machine.sources.keys() == {"dp0", "dp1"}
    assert store.source_reports() == host.store.source_reports()
    for arena in [*store.arenas.values(), *store.sources.values()]:
        arena.close()


def test_the_old_layout_can_return(host: SmpService) -> None:
    """An arena of the new layout is given up, whether its name is that of a source or not."""
    reshaping(host)
    make(host, "dp7")
    hold(host, "dp7", NEW)
    ask(host, adopt("return", "dp0", "dp1"))
    assert arenas(host) == ["dp0.arena", "dp1.arena"] and not host.machine.sources
    for shard in host.machine.shards.values():
        assert shard.slots[0].snapshot == OLD


def blocks(host: SmpService) -> int:
    """Memory of the files of ``dp1``, in blocks of 512 bytes."""
    return sum(path.stat().st_blocks for path in host.store.directory.glob("dp1.*"))


def test_only_the_snapshot_keeps_its_memory_until_the_old_layout_returns(host: SmpService) -> None:
    """A slot of something else is empty afterwards, and may be written to again."""
    header = SlotHeader(SlotState.COMMITTED, SnapshotId(1, 3), 30, local_only=True)
    host.store.arenas["dp1"].write_slot(1, header)
    arena, whole = host.store.arenas["dp1"], blocks(host)
    arena.data(0, writable=True)[:] = 7
    arena.data(1, writable=True)[:] = 8
    reshaping(host)
    assert arena.slot(1) == SlotHeader() and arena.slot(0).snapshot == OLD
    assert whole - blocks(host) >= arena.geometry.slot_span // 512 - 16
    assert (arena.data(0) == 7).all() and not arena.data(1).any()
    ask(host, adopt("return", "dp0", "dp1"))
    assert blocks(host) == whole
    assert host.machine.shards["dp1"].slots[1].state == SlotState.FREE


def test_arenas_that_were_not_made_sources_stay_when_others_return(host: SmpService) -> None:
    host.store.make_sources(OLD, host.machine)
    make(host, "dp2")
    hold(host, "dp2", OLD)
    ask(host, adopt("return", "dp0", "dp1", "dp2"))
    assert arenas(host) == ["dp0.arena", "dp1.arena", "dp2.arena"]


@pytest.mark.parametrize(("sources", "left"), [("hold", 3), ("drop", 1)])
def test_sources_stay_or_go_as_a_recovery_decides(
    host: SmpService, sources: m.Sources, left: int
) -> None:
    reshaping(host)
    ask(host, adopt(sources, "dp0"))
    assert len(arenas(host)) == left


@pytest.mark.parametrize(("snapshot", "left"), [(NEW, 3), (SnapshotId(2, 1), 1)])
def test_without_parity_sources_go_with_the_first_capture(
    host: SmpService, snapshot: SnapshotId, left: int
) -> None:
    """Until then the job's notes may name no shards but them."""
    reshaping(host)
    hold(host, "dp0", snapshot)
    ask(host, m.Commit(2, snapshot, "local"))
    assert len(arenas(host)) == left


def test_sources_go_when_a_snapshot_of_the_new_layout_is_protected(host: SmpService) -> None:
    reshaping(host)
    hold(host, "dp0", NEW)
    ask(host, m.Commit(2, NEW, "local"))
    assert len(arenas(host)) == 3
    slot = host.machine.shards["dp0"].slots[0]
    host.machine.shards["dp0"].slots[0] = slot.__class__(
        SlotState.PROTECTED, NEW, 40, record=slot.record, local_only=False, parity_valid=True
    )
    ask(host, m.Commit(2, NEW, "protected"))
    assert arenas(host) == ["dp0.arena"] and not host.machine.sources


def test_the_encoder_learns_where_all_is(host: SmpService) -> None:
    reshaping(host)
    host.machine.world = "w1"
    host.machine.take_effects()
    ranks = {"dp0": 0, "dp1": 0, "dp2": 1}
    assert isinstance(ask(host, m.Reshape(2, NEW, 40, "w1", OLD, ranks)), m.Ok)
    (order,) = [e.body for e in host.machine.take_effects() if isinstance(e, ToEncoder)]
    folder = host.store.directory
    assert isinstance(order, m.ReshapeOrder) and order.ranks == ranks
    assert order.held == {s: m.PlacedShard(str(folder / f"{s}.source"), 0) for s in ("dp0", "dp1")}
    given = m.PlacedShard(str(folder / "dp0.arena"), 0, str(folder / "dp0.layout"))
    assert order.new == {"dp0": given}
    assert host.machine.shards["dp0"].slots[0].state == SlotState.REBUILDING


def test_a_shard_that_is_filled_is_sealed_and_reported(host: SmpService) -> None:
    reshaping(host)
    host.machine.world = "w1"
    ask(host, m.Reshape(2, NEW, 40, "w1", OLD, {}))
    host.machine.take_effects()
    record = make_record(shard_id="dp0", snapshot=NEW, iteration=40)
    for world, taken in (("w0", False), ("w1", True)):
        answer = host.machine.handle(m.Reshaped(world, record, 10, 5, 0))
        assert isinstance(answer, m.Ok) is taken
    assert host.machine.shards["dp0"].slots[0].state == SlotState.SEALED
    (report,) = [e.body for e in host.machine.take_effects() if isinstance(e, ToCoordinator)]
    assert report.record == record


def test_a_trainer_gets_what_was_reshaped_for_it_or_an_empty_arena(host: SmpService) -> None:
    """It is empty if the ranks have declined the snapshot: nothing was reshaped."""
    reshaping(host)
    host.restore = m.RestoreReady(2, OLD, {}, reshaped=True, iteration=40)
    server: Any = None
    control, path = ControlServer(host, server, lambda: None), host.machine.paths["dp0"]
    assert control._prepared("dp0") == m.Prepared(path)
    hold(host, "dp0", NEW)
    record = host.machine.shards["dp0"].slots[0].record
    assert control._prepared("dp0") == m.Prepared(path, 0, record)


def test_a_source_that_was_removed_is_not_reported(host: SmpService) -> None:
    reshaping(host)
    (host.store.directory / "dp1.source").unlink()
    assert [r.shard_id for r in host.store.source_reports()] == ["dp0"]


def test_a_damaged_source_is_removed_and_no_arena_with_it(host: SmpService) -> None:
    reshaping(host)
    path = host.store.directory / "dp0.source"
    path.write_bytes(path.read_bytes()[:4096])
    store, machine = ArenaStore(host.store.directory, host.job), NodeMachine("node0")
    store.sanitize_files()
    store.adopt(machine)
    assert list(store.damaged) == ["dp0.source"] and list(machine.shards) == ["dp0"]
    assert store.forget_damaged() == [path]
    for arena in [*store.arenas.values(), *store.sources.values()]:
        arena.close()


def test_the_job_that_it_belongs_to_is_checked(host: SmpService) -> None:
    reshaping(host)
    store, machine = ArenaStore(host.store.directory, uuid.uuid4()), NodeMachine("node0")
    store.adopt(machine)
    assert len(store.foreign) == 3 and not machine.sources
