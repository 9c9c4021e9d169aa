"""The rules that keep a snapshot alive, as questions about slot headers.  Pure.

The model test switches them off one by one: without each of them something is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.identity import SnapshotId

NO_ROOT = bytes(32)
EMPTY_SLOT = SlotHeader(
    state=SlotState.FREE,
    snapshot=None,
    iteration=-1,
    local_only=False,
    record=None,
    parity_valid=False,
    parity_root=NO_ROOT,
    stripe_table=(),
)


MOST_SKIPPED = 4
"""Captures that are skipped, at least, before the last protected snapshot is given up."""

ENCODERS_BACK_SECONDS = 60.0
"""Encoders that have been away for longer are not expected back soon."""


def may_reuse(slots: Sequence[SlotHeader], index: int, *, give_up_protected: bool = False) -> bool:
    """Tell if a slot's bytes may be given up for a newer snapshot.

    Only a committed slot ever qualifies, so one in doubt waits for its outcome, and only
    next to a newer committed one: the newest is what a trainer's crash falls back to.
    A protected one is what a node's loss falls back to.  It needs a newer protected one
    next to it (which the coordinator commits only after all arenas hold it), or the
    coordinator's decision that it is given up.
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
    if slot.local_only or give_up_protected:
        return any(_newer(o, slot) for o in others)
    return any(not o.local_only and _newer(o, slot) for o in others)


def reusable(
    slots: Sequence[SlotHeader],
    spared: Collection[SnapshotId] = (),
    *,
    give_up_protected: bool = False,
) -> list[int]:
    """The slots that are not needed (may_reuse), less those of ``spared`` snapshots."""
    return [
        i
        for i, slot in enumerate(slots)
        if may_reuse(slots, i, give_up_protected=give_up_protected)
        and (slot.state == SlotState.FREE or slot.snapshot not in spared)
    ]


def without_lost(
    slots: Sequence[SlotHeader], lost: SnapshotId | None, spared: Collection[SnapshotId] = ()
) -> Sequence[SlotHeader]:
    """The slots with that of a ``lost`` snapshot as free, if there is another committed one.

    Committed bytes may be damaged beyond what parity makes up for.  Then an older snapshot is what
    every failure falls back to, and must not make room for the next one.
    """
    kept = any(s.state == SlotState.COMMITTED and s.snapshot != lost for s in slots)
    if lost is None or lost in spared or not kept:
        return slots
    given = [s.state == SlotState.COMMITTED and s.snapshot == lost for s in slots]
    return [EMPTY_SLOT if free else s for free, s in zip(given, slots, strict=True)]


def oldest_reusable(
    slots: Sequence[SlotHeader],
    spared: Collection[SnapshotId] = (),
    *,
    give_up_protected: bool = False,
) -> int | None:
    """The slot for the next snapshot: a free one, else the oldest that is not needed."""
    usable = reusable(slots, spared, give_up_protected=give_up_protected)
    return min(usable, key=lambda i: (slots[i].snapshot or (-1, -1))[:2], default=None)


def protected_gives_way(
    *, skipped: int, seconds_away: float, on_disk: bool, protectable: bool
) -> bool:
    """Tell if the last protected snapshot is given up for the next capture.

    The question arises when it fills one of two slots and a newer local snapshot the other,
    while no encoders are up.  ``skipped`` is how many captures have been skipped for it,
    ``seconds_away`` for how long encoders have been away.  ``on_disk``: a node's loss would
    fall back to a checkpoint that is as new.  ``protectable``: the job has parity at all.

    Encoders that were merely restarted are waited for.  Beyond that, trainers crash more often
    than nodes are lost, and each skipped capture is lost by the next crash.
    """
    if on_disk or not protectable:
        return True
    return skipped >= MOST_SKIPPED and seconds_away >= ENCODERS_BACK_SECONDS


def capturing(slots: Sequence[SlotHeader]) -> bool:
    """True while the trainer has not stopped with the last snapshot; nothing may be granted then.

    There is one permit word: a new permit would hide from a trainer that has not begun
    yet that the one before was revoked, and the slot of that one would never be free.
    """
    return any(slot.state == SlotState.CAPTURING for slot in slots)


def committed_local(slot: SlotHeader) -> bool:
    """True if the slot was committed without parity, also while parity is being made."""
    return slot.local_only and slot.record is not None


def is_committed(slot: SlotHeader) -> bool:
    """True if the coordinator lets a failure fall back to the slot's snapshot."""
    return slot.state == SlotState.COMMITTED or committed_local(slot)


def ending(slot: SlotHeader) -> bool:
    """True if the slot was aborted while a live writer might still touch it."""
    return slot.state != SlotState.FREE and slot.iteration == EMPTY_SLOT.iteration


def still_written(state: SlotState, trainer_alive: bool, encoder_alive: bool) -> bool:
    """True if a live process may still write into a slot in ``state``."""
    if state == SlotState.CAPTURING:
        return trainer_alive
    return state in (SlotState.ENCODING, SlotState.REBUILDING) and encoder_alive


def _newer(one: SlotHeader, other: SlotHeader) -> bool:
    assert one.snapshot is not None and other.snapshot is not None
    return one.snapshot > other.snapshot
