"""The rules that keep a snapshot alive, as questions about headers.  Pure.

The model test switches them off one by one: without each of them something is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.identity import SnapshotId
from megatron_ft.smp.slot_table import EMPTY_SLOT


def may_reuse(slots: Sequence[SlotHeader], index: int) -> bool:
    """Whether a slot's bytes may be given up for a newer snapshot.

    Only a committed slot ever qualifies, so one in doubt waits for its outcome.
    It does when a newer protected one is committed here (which the coordinator
    says only after all arenas hold it), or, for a local-only one, when anything
    at least as safe stays behind.
    """
    slot = slots[index]
    if slot.state != SlotState.COMMITTED:
        return slot.state == SlotState.FREE
    assert slot.snapshot is not None
    others = [
        other
        for position, other in enumerate(slots)
        if position != index and other.state == SlotState.COMMITTED
    ]
    if slot.local_only:
        return any(o.local_only is False or _newer(o, slot) for o in others)
    return any(not o.local_only and _newer(o, slot) for o in others)


def oldest_reusable(slots: Sequence[SlotHeader], spared: Collection[SnapshotId] = ()) -> int | None:
    """The slot for the next snapshot: a free one, else the oldest that nobody needs.

    Those of ``spared`` snapshots are needed.
    """
    usable = [
        i
        for i, slot in enumerate(slots)
        if may_reuse(slots, i) and (slot.state == SlotState.FREE or slot.snapshot not in spared)
    ]
    return min(usable, key=lambda i: _age(slots[i]), default=None)


def capturing(slots: Sequence[SlotHeader]) -> bool:
    """Whether the trainer has not stopped with the last snapshot: then nothing may be granted.

    There is one permit word: a new permit would hide from a trainer that has not begun
    yet that the one before was revoked, and the slot of that one would never be free.
    """
    return any(slot.state == SlotState.CAPTURING for slot in slots)


def ending(slot: SlotHeader) -> bool:
    """Whether the slot was aborted while a live writer might still touch it."""
    return slot.state != SlotState.FREE and slot.iteration == EMPTY_SLOT.iteration


def still_written(state: SlotState, trainer_alive: bool, encoder_alive: bool) -> bool:
    """Whether some live process may yet write into a slot in ``state``."""
    if state == SlotState.CAPTURING:
        return trainer_alive
    return state in (SlotState.ENCODING, SlotState.REBUILDING) and encoder_alive


def _newer(one: SlotHeader, other: SlotHeader) -> bool:
    assert one.snapshot is not None and other.snapshot is not None
    return one.snapshot > other.snapshot


def _age(slot: SlotHeader) -> tuple[int, int]:
    return (-1, -1) if slot.snapshot is None else (slot.snapshot[0], slot.snapshot[1])
