"""A node's SMP: slots whose memory comes later, and what it does about them."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ArenaMemoryError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp import store as store_module
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.service import SmpService
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.smp.store import ArenaStore
from tests.support.smp_node import create, service

ONE, TWO = SnapshotId(1, 1), SnapshotId(1, 2)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmpService]:
    """A node with the arena of ``dp0``, of which only the first slot has memory."""
    monkeypatch.setattr(store_module, "LATER_BYTES", 0)
    tmp_path.chmod(0o700)
    host = service(ProcessEnvironment("job", "node0", tmp_path, 1))
    host.machine.highest_incarnation = 1
    arena = host.store.allocate(create(data_bytes=8 << 20))
    assert arena is not None and arena.holes
    host.store.enter(arena, host.machine)
    yield host
    for one in host.store.arenas.values():
        one.close()


def slots(host: SmpService) -> ShardSlots:
    return host.machine.shards["dp0"]


def commit(host: SmpService, snapshot: SnapshotId) -> None:
    """Have a snapshot captured and committed, as far as headers go."""
    assert host.machine.handle(m.Grant(1, snapshot, 10)) == m.Ok()
    slots(host).begin_capture(snapshot)
    index = slots(host).slot_of(snapshot)
    slots(host).slots[index] = SlotHeader(SlotState.COMMITTED, snapshot, 10, local_only=True)


def train(host: SmpService) -> None:
    host.store.arenas["dp0"].write_progress(3)


async def heartbeat(host: SmpService) -> None:
    """Send a heartbeat, and wait until the work that it begins has ended."""
    host.make_memory()
    if (making := host._making) is not None:
        await asyncio.wait_for(making, 60.0)


def test_the_second_snapshot_waits_for_memory(host: SmpService) -> None:
    assert not host.machine.unmade()
    commit(host, ONE)
    assert host.machine.unmade()
    assert not host.machine.crowded() and not host.machine.held_back()
    refused = host.machine.handle(m.Grant(1, TWO, 20))
    assert isinstance(refused, m.Refused) and "no free slot" in refused.reason
    train(host)
    asyncio.run(heartbeat(host))
    assert not host.machine.unmade()
    assert host.machine.handle(m.Grant(1, TWO, 20)) == m.Ok()


def test_no_memory_is_made_beside_a_restart(host: SmpService) -> None:
    asyncio.run(heartbeat(host))
    assert host.store.arenas["dp0"].holes


def test_too_little_memory_is_told_until_there_is_some(
    host: SmpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arena: Arena, goes_on: Any) -> None:
        raise ArenaMemoryError("no memory")

    train(host)
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "complete", fail)
        asyncio.run(heartbeat(host))
    assert host.shortage == "no memory" and slots(host).made == 1
    asyncio.run(heartbeat(host))
    assert not host.shortage and slots(host).made == 2


def test_arenas_go_only_when_nobody_makes_memory_of_them(
    host: SmpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that came later would take memory that a reshape has given back."""
    begun, ended = threading.Event(), threading.Event()

    def slowly(arena: Arena, goes_on: Any) -> None:
        begun.set()
        until = time.monotonic() + 5
        while goes_on():
            if time.monotonic() > until:
                return
            time.sleep(0.001)
        ended.set()

    async def story() -> None:
        host.make_memory()
        await asyncio.to_thread(begun.wait, 30)
        server: Any = None
        control = ControlServer(host, server, lambda: None)
        await asyncio.wait_for(control.decide(b"", m.MakeSources(1, ONE)), 30)
        assert ended.is_set() and list(host.store.sources) == ["dp0"]

    train(host)
    monkeypatch.setattr(Arena, "complete", slowly)
    asyncio.run(story())
    for source in host.store.sources.values():
        source.close()


def test_an_smp_that_comes_after_makes_the_rest(host: SmpService) -> None:
    store, machine = ArenaStore(host.store.directory, host.job), NodeMachine("node0")
    store.adopt(machine)
    assert machine.shards["dp0"].made == 1
    store.arenas["dp0"].complete(lambda: True)
    store.note_memory(machine)
    assert machine.shards["dp0"].made == 2
    store.arenas["dp0"].close()


def test_a_source_that_was_about_to_return_is_whole_at_the_next_smp(host: SmpService) -> None:
    """Its only snapshot is in the second slot, and its first had been given back."""
    arena = host.store.arenas["dp0"]
    arena.complete(lambda: True)
    commit(host, ONE)
    arena.write_slot(1, slots(host).slots[0])
    arena.release(0)
    store, machine = ArenaStore(host.store.directory, host.job), NodeMachine("node0")
    store.adopt(machine)
    assert not store.arenas["dp0"].holes and machine.shards["dp0"].made == 2
    store.arenas["dp0"].close()


def test_what_was_promised_to_arenas_counts_for_the_next_one(
    host: SmpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    keep = Arena.create.__func__  # type: ignore[attr-defined]

    def note(kind: type[Arena], *words: Any, owed: int = 0, **more: Any) -> Arena:
        asked.append(owed)
        return keep(kind, *words, owed=owed, **more)  # type: ignore[no-any-return]

    monkeypatch.setattr(Arena, "create", classmethod(note))
    arena = host.store.allocate(create("dp1", data_bytes=8 << 20))
    assert arena is not None and asked == [host.store.arenas["dp0"].holes]
    arena.close()


def test_small_arenas_get_all_their_memory_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    store, machine = ArenaStore(tmp_path, uuid.uuid4()), NodeMachine("node0")
    arena = store.allocate(create())
    assert arena is not None and not arena.holes
    store.enter(arena, machine)
    assert machine.shards["dp0"].made == 2
    arena.close()
