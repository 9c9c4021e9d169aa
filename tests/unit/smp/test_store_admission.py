"""Whatever is wrong with one arena is mended, or costs that one shard; its cause is said."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import FORMAT_VERSION, SlotHeader, SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.smp.effects import StoreSlot
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.smp.store import ArenaStore, free
from tests.support.damage import (
    arena_header,
    closed,
    cut,
    damaged_records,
    extended,
    folder,
    link,
    magic,
    open_to_others,
    overwrite,
    second_name,
    slot_headers,
)
from tests.support.smp_node import create

JOB = uuid.UUID(int=7)
NOW = SlotHeader(SlotState.CAPTURING, SnapshotId(1, 9), 90)

Node = tuple[ArenaStore, NodeMachine]
Damage = Callable[[Path], None]


def version(path: Path) -> None:
    overwrite(path, 15, 1)


def stale(path: Path) -> None:
    """As the file was before the store's last write."""
    with open(path, "r+b") as file:
        file.write(path.with_name("older").read_bytes())


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


HARMLESS = [extended, open_to_others, closed]
MENDED_BY_ITS_OWNER = [*HARMLESS, magic, version, arena_header, slot_headers, stale]
IN_THE_WAY = [folder, link, second_name, pipe]
LOST = [cut, *IN_THE_WAY]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with one arena, whose slot 0 has changed since the copy ``older`` was made."""
    tmp_path.chmod(0o700)
    store, machine = ArenaStore(tmp_path, JOB), NodeMachine("node0")
    arena = store.allocate(create())
    assert arena is not None
    store.enter(arena, machine)
    shutil.copy(arena.path, tmp_path / "older")
    store.apply(StoreSlot("dp0", 0, NOW))
    machine.shards["dp0"].slots[0] = NOW
    yield store, machine
    for arena in store.arenas.values():
        arena.close()


def restarted(store: ArenaStore) -> Node:
    """The store of a new SMP in the same folder."""
    for arena in store.arenas.values():
        arena.close()
    store.arenas.clear()
    fresh, machine = ArenaStore(store.directory, JOB), NodeMachine("node0")
    fresh.sanitize_files()
    fresh.adopt(machine)
    return fresh, machine


def require_good(store: ArenaStore, machine: NodeMachine) -> None:
    assert not store.damaged and not store.foreign and list(machine.shards) == ["dp0"]
    with Arena.open(store.directory / "dp0.arena", job=JOB) as arena:
        assert arena.slot(0) == NOW and not damaged_records(arena)


def require_lost(store: ArenaStore, machine: NodeMachine) -> None:
    """And that a new arena can take its place, with nothing left behind."""
    assert not store.arenas and not machine.shards and not store.foreign
    assert "dp0.arena" in store.damaged["dp0.arena"]
    arena = store.allocate(create())
    assert arena is not None
    store.enter(arena, machine)
    assert not store.damaged
    assert not store.keep_only(["dp0"], machine)
    assert (store.directory / "dp0.arena").is_file()


@pytest.mark.parametrize("damage", MENDED_BY_ITS_OWNER)
def test_the_owner_writes_again_what_it_wrote(node: Node, damage: Damage) -> None:
    store, machine = node
    damage(store.directory / "dp0.arena")
    store.examine(machine)
    require_good(store, machine)


@pytest.mark.parametrize("damage", HARMLESS)
def test_a_wrong_mode_or_length_costs_nothing_after_a_restart(node: Node, damage: Damage) -> None:
    damage(node[0].directory / "dp0.arena")
    store, machine = restarted(node[0])
    require_good(store, machine)
    store.arenas["dp0"].close()


@pytest.mark.parametrize("damage", LOST)
def test_an_arena_that_others_cannot_open_is_one_lost_shard(node: Node, damage: Damage) -> None:
    store, machine = node
    damage(store.directory / "dp0.arena")
    store.examine(machine)
    require_lost(store, machine)


@pytest.mark.parametrize("damage", [*LOST, magic, arena_header, slot_headers])
def test_the_same_after_a_restart(node: Node, damage: Damage) -> None:
    damage(node[0].directory / "dp0.arena")
    store, machine = restarted(node[0])
    require_lost(store, machine)
    store.arenas["dp0"].close()


@pytest.mark.parametrize("job", [uuid.UUID(int=8)])
def test_an_arena_of_another_job_is_foreign_and_stays(node: Node, job: uuid.UUID) -> None:
    before = (node[0].directory / "dp0.arena").read_bytes()
    store = ArenaStore(node[0].directory, job)
    store.sanitize_files()
    store.adopt(NodeMachine("node0"))
    assert len(store.foreign) == 1 and not store.damaged
    assert (store.directory / "dp0.arena").read_bytes() == before


def test_an_arena_of_another_release_is_foreign_and_stays(node: Node) -> None:
    with open(node[0].directory / "dp0.arena", "r+b") as file:
        file.seek(12)
        file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))
    store, _ = restarted(node[0])
    assert len(store.foreign) == 1 and f"format version {FORMAT_VERSION + 1}" in store.foreign[0]


def test_arenas_that_are_not_trusted_are_set_aside_until_a_recovery_did_without(node: Node) -> None:
    store = ArenaStore(node[0].directory, JOB)
    store.quarantine_all("the notes are damaged")
    for fresh in (store, restarted(store)[0]):
        assert not fresh.arenas and not fresh.foreign
    aside = store.directory / "dp0.arena.aside"
    assert aside.is_file() and "the notes are damaged" in store.damaged["dp0.arena"]
    free(store.keep_only([], NodeMachine("node0")), store.forget_damaged())
    assert not aside.exists() and not store.damaged


@pytest.mark.parametrize("damage", [magic, version, arena_header, slot_headers, open_to_others])
def test_what_its_owner_knows_is_written_again_while_trainers_run(
    node: Node, damage: Damage
) -> None:
    """Encoders that are started next open the arena, and so does a drain."""
    store, machine = node
    path = store.arenas["dp0"].path
    store.mend(machine)
    damage(path)
    store.mend(machine)
    assert path.stat().st_mode & 0o777 == 0o600
    with Arena.open(path, job=JOB) as arena:
        assert arena.slot(0) == NOW and damaged_records(arena) == []
