"""Decides which snapshot a recovery serves, and what must be rebuilt for it.  Pure.

The rule: a snapshot of the current lineage can be served if in every stripe either no
member lacks it, or at most m do and the parity of all the others is complete.  The
newest such snapshot wins.  Commit words play no part: a snapshot that is complete
everywhere is consistent whether or not all have learned of its commit.

Some snapshots are passed over: rewound ones, and those that training fails from.  A snapshot can
be whole and still be bad, where weights have gone wrong before it was taken.  So failures soon
after a restore are held against the snapshot; after the second it is not used a third time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId, on_lineage
from megatron_ft.rpc.messages import ArenaReport, Inventory

FAILURE_LIMIT = 2
MOST_REJECTED = 64
"""Older ones are off the lineage by then, as each recovery starts from another snapshot."""


class Suspicion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Count of failures of training soon after it had started from a snapshot."""

    snapshot: SnapshotId
    failures: int


class Quarantine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of a job for bad snapshots, over all its incarnations and supervisors.

    ``before`` is an iteration to which the user has asked to rewind and which no recovery
    has carried out yet.  With ``over_disk`` memory, and what was drained of it, goes before the
    training framework's own checkpoints even where those are newer: they are of what was given up,
    until the newest is named (checkpoint.native.naming) in another way than ``named``, None if not
    known.
    ``own`` is how one of those was named that is not used, come what may.
    """

    suspects: tuple[Suspicion, ...] = ()
    rejected: tuple[SnapshotId, ...] = ()
    before: int | None = None
    over_disk: bool = False
    own: str = ""
    named: str | None = None

    def after_failure(self, started_from: SnapshotId, gained: int, near: int) -> Quarantine:
        """Quarantine after training from a snapshot failed ``gained`` iterations later.

        More than ``near`` iterations later, the failure clears the snapshot of suspicions;
        with ``near`` 0 nothing is ever suspected.  A rejected snapshot stays rejected, once.
        """
        others = tuple(s for s in self.suspects if s.snapshot != started_from)
        if gained > near or near <= 0:
            return msgspec.structs.replace(self, suspects=others)
        failures = 1 + self.failures(started_from)
        known = started_from in self.rejected
        if failures < FAILURE_LIMIT and not known:
            now = (*others, Suspicion(started_from, failures))[-MOST_REJECTED:]
            return msgspec.structs.replace(self, suspects=now)
        added = () if known else (started_from,)
        rejected = (*self.rejected, *added)[-MOST_REJECTED:]
        return msgspec.structs.replace(
            self, suspects=others, rejected=rejected, over_disk=True, named=None
        )

    def failures(self, snapshot: SnapshotId) -> int:
        """Count of failures soon after a start from ``snapshot``, if it is not rejected."""
        return next((s.failures for s in self.suspects if s.snapshot == snapshot), 0)

    def rewound(self, before: int) -> Quarantine:
        """Quarantine of iteration ``before`` and all later ones; an earlier wish still holds."""
        least = before if self.before is None else min(before, self.before)
        return msgspec.structs.replace(self, before=least, over_disk=True, named=None)

    def giving_up(self, own: str) -> Quarantine:
        """Quarantine that also gives up the framework's own checkpoint so named; '' for none."""
        return msgspec.structs.replace(self, own=own or self.own)

    def settled(self, named: str | None = None) -> Quarantine:
        """Quarantine after a recovery carried out the rewind: its lineage omits what was given up.

        ``named`` is how the framework's newest checkpoint was named then, None if not known.
        """
        known = named if self.over_disk and self.named is None else self.named
        return msgspec.structs.replace(self, before=None, named=known)

    def goes_before(self, named: str | None) -> bool:
        """True if memory goes before a newer checkpoint of the framework's own, so named.

        A checkpoint named since the last rollback holds what was done since.
        """
        return self.over_disk and (named in (None, "", self.named) or self.named is None)

    def reason_against(self, snapshot: SnapshotId, iteration: int) -> str:
        """Reason for which a snapshot, in memory or on disk, must not be used; empty if it may."""
        if snapshot in self.rejected:
            return f"training failed {FAILURE_LIMIT} times soon after a start from it"
        return self.reason_against_iteration(iteration)

    def reason_against_iteration(self, iteration: int) -> str:
        """Reason against a checkpoint of the framework's own, where only its iteration is known."""
        if self.before is not None and iteration >= self.before:
            return f"the job is to be rewound to before iteration {self.before}"
        return ""


NOTHING_REJECTED = Quarantine()


@dataclass(frozen=True)
class StripeState:
    """One stripe as stored in the arenas of its members; indices are never recomputed."""

    codec: str
    data_members: int
    parity_members: int
    data_bytes: int
    members: tuple[str, ...]
    block_bytes: int


@dataclass(frozen=True)
class Holding:
    """Node of one shard's arena, and the arena's report."""

    node: str
    arena: ArenaReport

    def slot(self, snapshot: SnapshotId) -> SlotHeader | None:
        """The slot with complete data of ``snapshot``, if there is one."""
        found = (s for s in self.arena.slots if s.snapshot == snapshot and usable(s))
        return next(found, None)


@dataclass(frozen=True)
class Decision:
    """Outcome of the decision: what a recovery does.

    ``snapshot`` is None when nothing can be served; ``explanation`` then says which
    stripe lost what.  ``lost`` maps a stripe to its members that must be rebuilt.
    ``protected`` says whether the snapshot survives another node loss once it is back.
    """

    snapshot: SnapshotId | None
    iteration: int
    protected: bool
    stripes: tuple[StripeState, ...]
    holdings: dict[str, Holding]
    lost: dict[StripeState, tuple[str, ...]] = field(default_factory=dict)
    explanation: str = ""


def decide(
    inventories: Sequence[Inventory],
    *,
    shard_count: int | None = None,
    corrupt: Collection[tuple[str, SnapshotId]] = (),
    quarantine: Quarantine = NOTHING_REJECTED,
    lineage: Sequence[Ancestor] = (),
) -> Decision:
    """The decision for what these nodes hold.

    ``shard_count`` is the number of shards of the job if it is known: with fewer found,
    whole stripes are gone and nothing can be served.  ``corrupt`` names shards whose
    bytes of a snapshot failed their digests: they count as lost.  What ``quarantine``
    rejects is passed over, and off the lineage of whatever is served instead.  ``lineage`` is
    the job's as its supervisor noted it: it counts if it is newer than that of all arenas
    found, which may be those of a node that was away when the job was rolled back.
    """
    holdings = owners(inventories)
    stripes = _stripes(holdings)
    known = sum(len(stripe.members) for stripe in stripes)
    if shard_count is not None and known < shard_count:
        text = f"{shard_count - known} of {shard_count} shards belong to stripes with no survivor"
        return Decision(None, -1, False, stripes, holdings, explanation=text)
    refusals: list[str] = []
    for snapshot in candidates(holdings, lineage):
        losses = {s: _lacking(s, snapshot, holdings, corrupt) for s in stripes}
        slots = (holding.slot(snapshot) for holding in holdings.values())
        iteration = next(slot.iteration for slot in slots if slot is not None)
        problem = quarantine.reason_against(snapshot, iteration) or _problem(
            snapshot, losses, holdings
        )
        if not problem:
            return _serve(snapshot, losses, stripes, holdings)
        refusals.append(f"snapshot {snapshot}: {problem}")
    text = "; ".join(refusals) or "no arena holds a complete snapshot"
    return Decision(None, -1, False, stripes, holdings, explanation=text)


def owners(inventories: Sequence[Inventory]) -> dict[str, Holding]:
    """The owner of each shard: the arena of the highest incarnation; older claims own nothing."""
    found: dict[str, Holding] = {}
    for inventory in inventories:
        for arena in inventory.arenas:
            other = found.get(arena.shard_id)
            if other is None or other.arena.incarnation < arena.incarnation:
                found[arena.shard_id] = Holding(inventory.node, arena)
    return found


def _stripes(holdings: dict[str, Holding]) -> tuple[StripeState, ...]:
    """Stripes as the newest arenas store them, each member in exactly one."""
    newest = sorted(holdings.values(), key=lambda h: h.arena.incarnation, reverse=True)
    stripes: dict[tuple[str, ...], StripeState] = {}
    placed: set[str] = set()
    for holding in newest:
        arena = holding.arena
        if arena.members in stripes or placed & set(arena.members):
            continue
        placed |= set(arena.members)
        stripes[arena.members] = StripeState(
            arena.codec,
            arena.data_members,
            arena.parity_members,
            arena.data_bytes,
            arena.members,
            arena.block_bytes,
        )
    return tuple(sorted(stripes.values(), key=lambda s: s.members))


def candidates(holdings: Mapping[str, Holding], noted: Sequence[Ancestor] = ()) -> list[SnapshotId]:
    """Snapshots of the current lineage of which some arena holds complete data, newest first.

    The current lineage is that of the newest arena, or the one that was ``noted`` if newer.
    """
    if not holdings:
        return []
    newest = max((h.arena for h in holdings.values()), key=lambda a: a.incarnation)
    newer = noted and noted[-1].incarnation > newest.incarnation
    lineage = noted if newer else newest.lineage
    found = {
        slot.snapshot
        for holding in holdings.values()
        for slot in holding.arena.slots
        if slot.snapshot is not None and usable(slot)
    }
    return sorted((s for s in found if on_lineage(s, lineage)), reverse=True)


def _lacking(
    stripe: StripeState,
    snapshot: SnapshotId,
    holdings: dict[str, Holding],
    corrupt: Collection[tuple[str, SnapshotId]],
) -> tuple[str, ...]:
    """Members that do not hold the snapshot, or hold other bytes than their peers vouch for."""
    slots = {
        member: holdings[member].slot(snapshot)
        for member in stripe.members
        if member in holdings and (member, snapshot) not in corrupt
    }
    lacking = []
    for member in stripe.members:
        slot = slots.get(member)
        peers = (other for shard, other in slots.items() if shard != member)
        if slot is None or slot.record is None or not _vouched_for(slot.record, peers):
            lacking.append(member)
    return tuple(lacking)


def _vouched_for(record: SealedRecord, peers: Iterable[SlotHeader | None]) -> bool:
    """True if no peer knows the shard's sealed bytes by another digest root."""
    known = (
        other.digest_root
        for slot in peers
        if slot is not None
        for other in slot.stripe_table
        if other.shard_id == record.shard_id
    )
    return all(root == record.digest_root for root in known)


def _problem(
    snapshot: SnapshotId,
    losses: dict[StripeState, tuple[str, ...]],
    holdings: dict[str, Holding],
) -> str | None:
    """Reason for which a snapshot cannot be served, or None if it can."""
    for stripe, lost in losses.items():
        others = [holdings[m].slot(snapshot) for m in stripe.members if lost and m not in lost]
        complete = all(slot is not None and slot.parity_valid for slot in others)
        if makes_up(len(lost), stripe.parity_members, complete):
            continue
        if len(lost) > stripe.parity_members:
            return (
                f"the stripe of {', '.join(stripe.members)} lost {len(lost)} shards "
                f"({', '.join(lost)}) and has parity for {stripe.parity_members}"
            )
        return f"{', '.join(lost)} is lost and the stripe's parity was not complete"
    return None


def makes_up(lacking: int, parity_members: int, complete: bool) -> bool:
    """The rule of a stripe: True if it serves although this many of its members lack a snapshot.

    ``complete`` says that all the others have parity.
    """
    return not lacking or (lacking <= parity_members and complete)


def _serve(
    snapshot: SnapshotId,
    losses: dict[StripeState, tuple[str, ...]],
    stripes: tuple[StripeState, ...],
    holdings: dict[str, Holding],
) -> Decision:
    lost = {stripe: members for stripe, members in losses.items() if members}
    gone = {member for members in lost.values() for member in members}
    slots = [h.slot(snapshot) for shard, h in holdings.items() if shard not in gone]
    iterations = {slot.iteration for slot in slots if slot is not None}
    assert len(iterations) == 1, f"snapshot {snapshot} has iterations {iterations}"
    protected = all(slot is not None and slot.parity_valid for slot in slots)
    return Decision(snapshot, iterations.pop(), protected, stripes, holdings, lost)


def usable(slot: SlotHeader) -> bool:
    """True if a reported slot holds complete, digested data."""
    if slot.state == SlotState.ENCODING and slot.local_only:
        return slot.record is not None  # committed without parity, and given some just now
    return slot.record is not None and SlotState(slot.state) in (
        SlotState.SEALED,
        SlotState.PROTECTED,
        SlotState.COMMITTED,
    )
