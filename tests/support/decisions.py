"""Inventories of two snapshots, and what the recovery decides from them."""

from __future__ import annotations

from dataclasses import replace

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint.decide import Decision, StripeState, decide
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from tests.protocol.model.memory import MemoryArena, MemorySlot, inventory_after_fence, record_of

OLD, NEW, ROLLED_BACK = SnapshotId(1, 4), SnapshotId(2, 1), SnapshotId(1, 5)


LINEAGE = (Ancestor(1, None), Ancestor(2, OLD))


STRIPES = (
    StripeState("xor", 2, 1, 128, ("dp0", "dp1", "dp2"), 64),
    StripeState("xor", 2, 1, 128, ("dp3", "dp4", "dp5"), 64),
)


SHARDS = tuple(shard for stripe in STRIPES for shard in stripe.members)


# The same iteration on purpose: it must not matter.
ITERATION = 50


def header(
    shard: str, snapshot: SnapshotId, state: SlotState, *, parity: bool | None = None
) -> SlotHeader:
    """A slot with ``snapshot``; protected ones have parity unless ``parity`` says otherwise."""
    if state == SlotState.FREE:
        return EMPTY_SLOT
    sealed = state not in (SlotState.CAPTURING, SlotState.REBUILDING)
    if parity is None:
        parity = state in (SlotState.PROTECTED, SlotState.COMMITTED)
    stripe = next(s for s in STRIPES if shard in s.members)
    table = tuple(record_of(snapshot, member, ITERATION) for member in stripe.members)
    return replace(
        EMPTY_SLOT,
        state=state,
        snapshot=snapshot,
        iteration=ITERATION,
        record=record_of(snapshot, shard, ITERATION) if sealed else None,
        parity_valid=parity,
        stripe_table=table if parity else (),
    )


def arena(
    shard: str, *headers: SlotHeader, incarnation: int = 2, lineage: tuple[Ancestor, ...] = LINEAGE
) -> MemoryArena:
    stripe = next(s for s in STRIPES if shard in s.members)
    return MemoryArena(shard, stripe, incarnation, lineage, [MemorySlot(h) for h in headers])


def inventories(*arenas: MemoryArena) -> list[m.Inventory]:
    """Each arena on a node of its own, named after it and its claim."""
    return [inventory_after_fence(f"{a.shard}-{a.incarnation}", [a]) for a in arenas]


def everywhere(
    state: SlotState = SlotState.COMMITTED, snapshot: SnapshotId = NEW
) -> dict[str, MemoryArena]:
    older = [header(shard, OLD, SlotState.COMMITTED) for shard in SHARDS]
    newer = [header(shard, snapshot, state) for shard in SHARDS]
    return {s: arena(s, a, b) for s, a, b in zip(SHARDS, older, newer, strict=True)}


def decided(arenas: dict[str, MemoryArena], **known: object) -> Decision:
    return decide(inventories(*arenas.values()), **known)  # type: ignore[arg-type]
