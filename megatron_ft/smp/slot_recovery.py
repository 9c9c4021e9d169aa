"""What a recovery changes of slots: rebuilt and loaded shards, and what is rolled back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.rpc.refusals import TransitionRefusedError
from megatron_ft.smp.slot_rules import ending, oldest_reusable
from megatron_ft.smp.slot_table import EMPTY_SLOT, SlotTable


def repairable(slots: SlotTable, snapshot: SnapshotId) -> int:
    """The slot of a committed snapshot with parity: single blocks of it can be repaired.

    It stays COMMITTED meanwhile: what is written is proved by the roots in its header.
    """
    index = slots.expect(snapshot, SlotState.COMMITTED)
    if not slots.slots[index].parity_valid:
        raise TransitionRefusedError(f"{slots.shard_id} has no parity of {snapshot}")
    return index


def begin_rebuild(slots: SlotTable, snapshot: SnapshotId, iteration: int) -> int:
    """Make a slot the target of a rebuild: lost until its digests have matched."""
    index = slots.find(snapshot)
    if index is None:
        index = oldest_reusable(slots.slots)
    if index is None:
        raise TransitionRefusedError(f"{slots.shard_id} has no slot to rebuild {snapshot} in")
    slots.put(
        index,
        replace(EMPTY_SLOT, state=SlotState.REBUILDING, snapshot=snapshot, iteration=iteration),
    )
    return index


def rebuilt(
    slots: SlotTable, record: SealedRecord, parity_root: bytes, table: tuple[SealedRecord, ...]
) -> None:
    """The rebuild target matches its digests: REBUILDING to PROTECTED."""
    index = slots.expect(record.snapshot, SlotState.REBUILDING)
    if ending(slots.slots[index]):
        raise TransitionRefusedError(f"{slots.shard_id}: {record.snapshot} was given up")
    slots.put(
        index,
        SlotHeader(
            state=SlotState.PROTECTED,
            snapshot=record.snapshot,
            iteration=record.iteration,
            local_only=False,
            record=record,
            parity_valid=True,
            parity_root=parity_root,
            stripe_table=table,
        ),
    )


def loaded(slots: SlotTable, record: SealedRecord) -> None:
    """What came from disk matches its digests: REBUILDING to SEALED, without parity."""
    index = slots.expect(record.snapshot, SlotState.REBUILDING)
    if ending(slots.slots[index]) or slots.slots[index].iteration != record.iteration:
        raise TransitionRefusedError(f"{slots.shard_id} does not wait for {record.snapshot}")
    slots.put(index, replace(slots.slots[index], state=SlotState.SEALED, record=record))


def forget(slots: SlotTable, unwanted: Callable[[SnapshotId], bool]) -> None:
    """Free every slot whose snapshot is ``unwanted``; its writers must be dead."""
    for index, slot in enumerate(slots.slots):
        if slot.snapshot is not None and unwanted(slot.snapshot):
            slots.free(index)
