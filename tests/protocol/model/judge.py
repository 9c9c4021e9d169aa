"""Who knows the truth about each snapshot, and judges what a recovery would make of memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint import decide as decide_module
from megatron_ft.checkpoint.decide import Decision, StripeState
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from tests.protocol.model import memory
from tests.protocol.model.memory import (
    DAMAGED,
    Memory,
    MemorySlot,
    inventory_after_fence,
    record_of,
)


class Violation(Exception):
    """The protocol has lost, mixed or invented bytes, or has two leaders."""


class Judge:
    """Keeps the truth about snapshots and compares what a recovery would do with it.

    ``lost`` are shards whose bytes went with a node since everything was last protected.
    ``valid`` are the snapshots that the job as it runs now descends from.  ``durable`` is the
    newest that the job believes to be on disk; ``hurt`` are shards with bytes gone bad since.
    ``noted`` is the lineage in the supervisor's notes.
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
        self.given_up: set[SnapshotId] = set()
        self.floor: SnapshotId | None = None
        self.local_floor: SnapshotId | None = None
        self.durable: SnapshotId | None = None
        self.lost: set[str] = set()
        self.hurt: set[str] = set()
        self.registered = False
        self.noted: tuple[Ancestor, ...] = ()

    # What happens.

    def granted(self, snapshot: SnapshotId, iteration: int) -> None:
        self.iterations[snapshot] = iteration
        self.sealed[snapshot] = set()
        self.valid.add(snapshot)

    def protected_given_up(self) -> None:
        """The coordinator lets the last protected snapshot make room: the job may lose it."""
        if self.floor is not None:
            self.given_up.add(self.floor)
        self.floor = None

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

    def restored(self, decision: Decision, fresh: bool) -> None:
        """All trainers are let go with what was decided; ``fresh`` if no arena stayed."""
        parent = decision.snapshot
        self.valid = {s for s in self.valid if parent is not None and s <= parent}
        stays = self.protected & self.valid - self.given_up
        self.floor = max((s for s in stays), default=None)
        self.local_floor = parent
        if fresh:
            self.floor, self.lost = None, set()
            self.protected.clear()
            self.everywhere.clear()
        if self.durable not in self.valid:
            self.durable = None

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
        if gone in self.given_up:
            return
        if old.state == SlotState.COMMITTED and not old.local_only and not newer:
            raise Violation(f"I1: {shard} reuses {gone}; no newer one is protected everywhere")

    # The disk.

    def on_disk(self, snapshots: Collection[SnapshotId]) -> None:
        """The checkpoints are these now: what the job relies on is among them, or a newer one."""
        if self.durable is None or self.durable not in self.valid:
            return
        if not any(s in self.valid and s >= self.durable for s in snapshots):
            raise Violation(f"I2: {self.durable} was durable and is gone from the disk")

    def taken_from_disk(self, snapshot: SnapshotId) -> None:
        self._check_identity(snapshot)

    # What a recovery would do now.

    def check(self, nodes: Memory, places: Mapping[str, str]) -> None:
        """I2: whatever may be lost beside what is lost, the right snapshot can be served."""
        inventories = {n: inventory_after_fence(n, arenas) for n, arenas in nodes.items()}
        placed = {n: [a for a in there if places[a.shard] == n] for n, there in nodes.items()}
        bad = memory.damaged(placed)
        for gone in self._bearable(places, nodes):
            there = {n: i for n, i in inventories.items() if n not in gone}
            self.judge(there, nodes, places, bad)

    def _bearable(self, places: Mapping[str, str], nodes: Memory) -> Iterable[frozenset[str]]:
        yield frozenset()
        most = max(stripe.parity_members for stripe in self.stripes)
        candidates = sorted({node for node in places.values() if node in nodes})
        for count in range(1, most + 1):
            yield from map(frozenset, combinations(candidates, count))

    def judge(
        self,
        inventories: Mapping[str, m.Inventory],
        nodes: Memory,
        places: Mapping[str, str],
        corrupt: Collection[tuple[str, SnapshotId]] = (),
    ) -> Decision:
        """The decision for these nodes; Violation if it is wrong.

        ``corrupt`` are shards that are known to be damaged.  One that is damaged and not among
        them may be decided for: whoever reads it finds out.
        """
        known = len(self.shards) if self.registered else None
        decision = decide_module.decide(
            memory.owned(inventories, places),
            shard_count=known,
            corrupt=corrupt,
            lineage=self.noted,
        )
        lost = self.lost | {s for s, node in places.items() if node not in inventories}
        self._check_floor(decision, lost | self.hurt)
        if decision.snapshot is not None:
            self._check_identity(decision.snapshot)
            self._check_bytes(decision, decision.snapshot, nodes)
        return decision

    def _check_floor(self, decision: Decision, lost: set[str]) -> None:
        rule, floor = "I2", self.floor if self._bears(lost) else None
        if not lost:
            # Nothing but trainers has ended: the newest that was committed, at any level.
            rule, floor = "I2b", self.local_floor
        if floor is not None and (decision.snapshot is None or decision.snapshot < floor):
            raise Violation(
                f"{rule}: {floor} must be served without {sorted(lost)}, got {decision.snapshot}: "
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
        return arena.slots[holding.arena.slots.index(report)]

    def _check_data(self, slot: MemorySlot, shard: str, snapshot: SnapshotId) -> None:
        if any(tag not in ((snapshot, shard), DAMAGED) for tag in slot.data):
            raise Violation(f"{shard} would be served as {snapshot}, its bytes are {slot.data}")

    def _check_parity(
        self, slot: MemorySlot, stripe: StripeState, lost: Iterable[str], snapshot: SnapshotId
    ) -> None:
        whole = frozenset((snapshot, shard) for shard in stripe.members)
        if any(tags != whole for tags in slot.parity):
            raise Violation(f"{lost} would be rebuilt from parity of {slot.parity}")
        vouched = {record.shard_id: record for record in slot.header.stripe_table}
        for shard in lost:
            truth = record_of(snapshot, shard, self.iterations[snapshot])
            if vouched.get(shard) != truth:
                raise Violation(f"rule 6: nobody can verify a rebuilt {shard} of {snapshot}")
