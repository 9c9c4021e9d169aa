"""The memory of the protocol model: what bytes really are in each slot.

A part of a data region holds a *tag*, (snapshot id, shard): whose bytes these are.  A part
of a parity region holds the set of tags that it was computed from.  Headers are what the
machines believe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from megatron_ft.arena.format import Permit, SlotHeader
from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine

Tag = tuple[SnapshotId, str]
DAMAGED: Tag = (SnapshotId(0, 0), "damaged")
"""Bytes that have gone bad by themselves; their digests say so to whoever looks."""


@dataclass
class MemorySlot:
    """One slot: its stored header, and its bytes, by parts."""

    header: SlotHeader = EMPTY_SLOT
    data: tuple[Tag | None, ...] = (None, None)
    parity: tuple[frozenset[Tag], ...] = (frozenset(), frozenset())

    @classmethod
    def of(cls, parts: int) -> MemorySlot:
        return cls(EMPTY_SLOT, (None,) * parts, (frozenset(),) * parts)

    def write_data(self, part: int, tag: Tag | None) -> None:
        self.data = (*self.data[:part], tag, *self.data[part + 1 :])

    def write_parity(self, part: int, tags: frozenset[Tag]) -> None:
        self.parity = (*self.parity[:part], tags, *self.parity[part + 1 :])


@dataclass
class MemoryArena:
    """One arena file; processes that mapped it keep it, whatever becomes of its name."""

    shard: str
    stripe: StripeState
    incarnation: int
    lineage: tuple[Ancestor, ...]
    slots: list[MemorySlot] = field(default_factory=list)
    permit: Permit | None = None

    def headers(self) -> list[SlotHeader]:
        return [slot.header for slot in self.slots]

    def report(self, slots: Iterable[SlotHeader]) -> m.ArenaReport:
        return m.ArenaReport(
            shard_id=self.shard,
            incarnation=self.incarnation,
            lineage=self.lineage,
            codec=self.stripe.codec,
            data_members=self.stripe.data_members,
            parity_members=self.stripe.parity_members,
            member_index=self.stripe.members.index(self.shard),
            members=self.stripe.members,
            data_bytes=self.stripe.data_bytes,
            file_bytes=0,
            block_bytes=self.stripe.block_bytes,
            slots=tuple(slots),
        )


Memory = Mapping[str, Iterable[MemoryArena]]
"""The arenas of each node."""


def record_of(snapshot: SnapshotId, shard: str, iteration: int) -> SealedRecord:
    """The sealed record of a shard; its root stands for exactly the bytes of its tag."""
    return SealedRecord(shard, snapshot, iteration, 0, 0, 0, 0, 0, b"", root_of((snapshot, shard)))


def root_of(tag: Tag) -> bytes:
    """What proves the bytes of a tag."""
    return f"{tag[0]} {tag[1]}".encode().ljust(32)


def damaged(memory: Memory) -> set[tuple[str, SnapshotId]]:
    """Shards of snapshots with bytes that have gone bad, whether anybody knows or not."""
    return {
        (arena.shard, slot.header.snapshot)
        for arenas in memory.values()
        for arena in arenas
        for slot in arena.slots
        if DAMAGED in slot.data and slot.header.snapshot is not None
    }


def inventory_after_fence(node: str, arenas: Iterable[MemoryArena]) -> m.Inventory:
    """What a node would report if all its writers died now: from stored headers alone."""
    machine = NodeMachine(node)
    for arena in arenas:
        machine.shards[arena.shard] = ShardSlots(arena.shard, arena.headers())
    machine.admit(1 << 30)
    reports = (arena.report(machine.shards[arena.shard].slots) for arena in arenas)
    return m.Inventory(node, machine.highest_incarnation, tuple(reports))


def owned(inventories: Mapping[str, m.Inventory], places: Mapping[str, str]) -> list[m.Inventory]:
    """Rule 10, as in supervisor/membership.py: what lies on another node than its place is
    nothing.
    """
    return [
        msgspec.structs.replace(
            inventory, arenas=tuple(a for a in inventory.arenas if places[a.shard_id] == node)
        )
        for node, inventory in inventories.items()
    ]
