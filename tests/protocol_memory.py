"""The memory of the protocol model: what bytes really are in each slot, and who judges them.

A half of a data region holds a *tag*, (snapshot id, shard): whose bytes these are.  A half
of a parity region holds the set of tags that it was computed from.  Headers are what the
machines believe; the judge compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from megatron_ft.arena.format import Permit, SlotHeader, SlotState
from megatron_ft.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.recovery import decide as decide_module
from megatron_ft.recovery.decide import Decision, StripeState
from megatron_ft.smp import messages as m
from megatron_ft.smp.node import NodeMachine
from megatron_ft.smp.slots import EMPTY_SLOT, ShardSlots

Tag = tuple[SnapshotId, str]
HALVES = 2


class Violation(Exception):
    """The protocol has lost, mixed or invented bytes."""


@dataclass
class MemorySlot:
    """One slot: its stored header, and its bytes."""

    header: SlotHeader = EMPTY_SLOT
    data: list[Tag | None] = field(default_factory=lambda: [None] * HALVES)
    parity: list[frozenset[Tag]] = field(default_factory=lambda: [frozenset()] * HALVES)


@dataclass
class MemoryArena:
    """One arena file; processes that mapped it keep it, whatever becomes of its name."""

    shard: str
    stripe: StripeState
    incarnation: int
    lineage: tuple[Ancestor, ...]
    slots: list[MemorySlot]
    permit: Permit | None = None

    def headers(self) -> list[SlotHeader]:
        return [slot.header for slot in self.slots]

    def report(self, slots: tuple[m.SlotReport, ...]) -> m.ArenaReport:
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
            slots=slots,
        )


def record_of(snapshot: SnapshotId, shard: str, iteration: int) -> SealedRecord:
    """The sealed record of a shard; its root stands for exactly the bytes of its tag."""
    root = f"{snapshot} {shard}".encode().ljust(32)
    return SealedRecord(shard, snapshot, iteration, 0, 0, 0, 0, 0, b"", root)


Memory = Mapping[str, Iterable[MemoryArena]]


def inventory_after_fence(node: str, arenas: Iterable[MemoryArena]) -> m.Inventory:
    """What a node would report if all its writers died now: from stored headers alone."""
    machine = NodeMachine(node)
    for arena in arenas:
        machine.shards[arena.shard] = ShardSlots(arena.shard, arena.headers())
    machine.admit(1 << 30)
    reports = (arena.report(machine.inventory_slots(arena.shard)) for arena in arenas)
    return m.Inventory(node, machine.highest_incarnation, tuple(reports))


def owned(inventories: Mapping[str, m.Inventory], places: Mapping[str, str]) -> list[m.Inventory]:
    """Rule 10, as in launch/membership.py: what lies on another node than its place is nothing."""
    return [
        msgspec.structs.replace(
            inventory, arenas=tuple(a for a in inventory.arenas if places[a.shard_id] == node)
        )
        for node, inventory in inventories.items()
    ]


class Judge:
    """Keeps the truth about snapshots and compares what a recovery would do with it.

    ``lost`` are shards whose bytes went with a node since everything was last protected.
    ``valid`` are the snapshots that the job as it runs now descends from.
    """

    def __init__(self, stripes: tuple[StripeState, ...], slot_count: int) -> None:
        self.stripes, self.slot_count = stripes, slot_count
        self.shards = tuple(shard for stripe in stripes for shard in stripe.members)
        self.iterations: dict[SnapshotId, int] = {}
        self.sealed: dict[SnapshotId, set[str]] = {}
        self.valid: set[SnapshotId] = set()
        self.aborted: set[SnapshotId] = set()
        self.protected: set[SnapshotId] = set()
        self.everywhere: set[SnapshotId] = set()
        self.floor: SnapshotId | None = None
        self.local_floor: SnapshotId | None = None
        self.lost: set[str] = set()
        self.registered = False

    # What happens.

    def granted(self, snapshot: SnapshotId, iteration: int) -> None:
        self.iterations[snapshot] = iteration
        self.sealed[snapshot] = set()
        self.valid.add(snapshot)
        if self.slot_count == 2 and self.floor is not None:
            self.local_floor = self.floor  # rule 9: only the local one may be given up

    def encode_ordered(self, snapshot: SnapshotId) -> None:
        if len(self.sealed[snapshot]) < len(self.shards):
            raise Violation(f"rule 5: {snapshot} is encoded while it is being captured")

    def committed(self, snapshot: SnapshotId, level: str, missing: set[str]) -> None:
        """The coordinator says commit; ``missing`` are shards on nodes that are gone."""
        if len(self.sealed[snapshot]) < len(self.shards):
            raise Violation(f"rule 4: {snapshot} is committed, but not all ranks captured it")
        if snapshot in self.aborted:
            raise Violation(f"{snapshot} is committed after it was aborted")
        self.local_floor = snapshot
        if level == "protected":
            self.protected.add(snapshot)
            self.floor = snapshot
            self.lost = set(missing)

    def restored(self, decision: Decision) -> None:
        """All trainers are let go with what was decided."""
        parent = decision.snapshot
        self.valid = {s for s in self.valid if parent is not None and s <= parent}
        self.floor = max((s for s in self.protected & self.valid), default=None)
        self.local_floor = parent

    def node_lost(self, shards: Iterable[str]) -> None:
        self.lost |= set(shards)

    def stored(self, old: SlotHeader, new: SlotHeader, shard: str, placed: Memory) -> None:
        """A slot header was stored: I1."""
        if new.state in (SlotState.PROTECTED, SlotState.COMMITTED) and new.parity_valid:
            self._note_protected(new.snapshot, placed)
        if new.state == SlotState.CAPTURING and old.snapshot != new.snapshot:
            self._check_reuse(old, shard)

    def _note_protected(self, snapshot: SnapshotId | None, placed: Memory) -> None:
        arenas = [arena for some in placed.values() for arena in some]
        holders = {
            arena.shard
            for arena in arenas
            for header in arena.headers()
            if header.snapshot == snapshot and header.parity_valid
        }
        if snapshot is not None and len(holders) == len(self.shards):
            self.everywhere.add(snapshot)

    def _check_reuse(self, old: SlotHeader, shard: str) -> None:
        gone = old.snapshot
        if gone is None or gone not in self.valid or gone in self.aborted:
            return
        newer = {s for s in self.everywhere & self.valid if s > gone}
        if old.state in (SlotState.SEALED, SlotState.PROTECTED):
            raise Violation(f"rule 6: {shard} reuses its slot in doubt, {gone}")
        if old.state == SlotState.COMMITTED and not old.local_only and not newer:
            raise Violation(f"I1: {shard} reuses {gone}; no newer one is protected everywhere")

    # What a recovery would do now.

    def check(self, nodes: Memory, places: Mapping[str, str]) -> None:
        """I2: whatever may be lost beside what is lost, the right snapshot can be served."""
        inventories = {n: inventory_after_fence(n, arenas) for n, arenas in nodes.items()}
        for gone in self._bearable(places, nodes):
            there = {n: i for n, i in inventories.items() if n not in gone}
            self.judge(there, nodes, places)

    def _bearable(self, places: Mapping[str, str], nodes: Memory) -> Iterable[frozenset[str]]:
        yield frozenset()
        most = max(stripe.parity_members for stripe in self.stripes)
        candidates = sorted({node for node in places.values() if node in nodes})
        for count in range(1, most + 1):
            yield from map(frozenset, combinations(candidates, count))

    def judge(
        self, inventories: Mapping[str, m.Inventory], nodes: Memory, places: Mapping[str, str]
    ) -> Decision:
        """The decision for these nodes; Violation if it is wrong."""
        known = len(self.shards) if self.registered else None
        decision = decide_module.decide(owned(inventories, places), shard_count=known)
        lost = self.lost | {s for s, node in places.items() if node not in inventories}
        self._check_floor(decision, lost)
        if decision.snapshot is not None:
            self._check_identity(decision.snapshot)
            self._check_bytes(decision, decision.snapshot, nodes)
        return decision

    def _check_floor(self, decision: Decision, lost: set[str]) -> None:
        floor = self.floor if self._bears(lost) else None
        if not lost:
            floor = self.local_floor
        if floor is not None and (decision.snapshot is None or decision.snapshot < floor):
            raise Violation(
                f"I2: {floor} must be served without {sorted(lost)}, got {decision.snapshot}: "
                f"{decision.explanation}"
            )

    def _bears(self, lost: set[str]) -> bool:
        return all(len(lost & set(s.members)) <= s.parity_members for s in self.stripes)

    def _check_identity(self, snapshot: SnapshotId) -> None:
        if snapshot not in self.valid:
            raise Violation(f"rule 1: {snapshot} was rolled back and is served")
        if snapshot in self.aborted:
            raise Violation(f"{snapshot} was aborted and is served")

    def _check_bytes(self, decision: Decision, snapshot: SnapshotId, nodes: Memory) -> None:
        for stripe in decision.stripes:
            lost = decision.lost.get(stripe, ())
            for shard in stripe.members:
                if shard not in lost:
                    slot = self._slot(decision, shard, snapshot, nodes)
                    self._check_data(slot, shard, snapshot)
                    if lost:
                        self._check_parity(slot, stripe, lost, snapshot)

    def _slot(
        self, decision: Decision, shard: str, snapshot: SnapshotId, nodes: Memory
    ) -> MemorySlot:
        holding = decision.holdings[shard]
        arena = next(a for a in nodes[holding.node] if a.shard == shard)
        report = holding.slot(snapshot)
        assert report is not None
        return arena.slots[report.slot]

    def _check_data(self, slot: MemorySlot, shard: str, snapshot: SnapshotId) -> None:
        if slot.data != [(snapshot, shard)] * HALVES:
            raise Violation(f"{shard} would be served as {snapshot}, its bytes are {slot.data}")

    def _check_parity(
        self, slot: MemorySlot, stripe: StripeState, lost: Iterable[str], snapshot: SnapshotId
    ) -> None:
        whole = frozenset((snapshot, shard) for shard in stripe.members)
        if slot.parity != [whole] * HALVES:
            raise Violation(f"{lost} would be rebuilt from parity of {slot.parity}")
        vouched = {record.shard_id: record for record in slot.header.stripe_table}
        for shard in lost:
            truth = record_of(snapshot, shard, self.iterations[snapshot])
            if vouched.get(shard) != truth:
                raise Violation(f"rule 6: nobody can verify a rebuilt {shard} of {snapshot}")
