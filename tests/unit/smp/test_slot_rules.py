"""The rules that keep a snapshot alive, the table of headers, and changes of a recovery."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import TransitionRefusedError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.smp.slot_rules import (
    EMPTY_SLOT,
    ENCODERS_BACK_SECONDS,
    MOST_SKIPPED,
    capturing,
    ending,
    may_reuse,
    oldest_reusable,
    protected_gives_way,
    still_written,
    without_lost,
)
from megatron_ft.smp.slots import ShardSlots
from tests.protocol.model.memory import record_of
from tests.support.slot_samples import (
    CAPTURING,
    COMMITTED,
    ENCODING,
    FREE,
    REBUILDING,
    ROOT,
    SEALED,
    SHARD,
    TABLE,
    THREE,
    TWO,
    header,
    headers,
)

SLOTS = st.lists(headers, min_size=1, max_size=4, unique_by=lambda h: h.snapshot or id(h))
MANY = settings(max_examples=500, derandomize=True, deadline=None)


def newest(slots: list[SlotHeader]) -> SnapshotId | None:
    return max((s.snapshot for s in slots if s.snapshot is not None), default=None)


@given(SLOTS)
@MANY
def test_all_may_be_reused_but_what_is_in_doubt_and_the_one_to_fall_back_to(
    slots: list[SlotHeader],
) -> None:
    """That is the newest for a trainer's crash, and the newest protected one for a node's loss."""
    committed = [s for s in slots if s.state == COMMITTED]
    last = newest(committed)
    protected = newest([s for s in committed if not s.local_only])
    for index, slot in enumerate(slots):
        older = slot.state == COMMITTED and slot.snapshot != last
        given_up = slot.state == FREE or (older and slot.snapshot != protected)
        assert may_reuse(slots, index) == given_up
        given_up = slot.state == FREE or older
        assert may_reuse(slots, index, give_up_protected=True) == given_up


def test_the_protected_one_gives_way_only_when_encoders_are_not_expected_back() -> None:
    known = {"on_disk": False, "protectable": True}
    for skipped, seconds in product((0, MOST_SKIPPED - 1), (0.0, 1e6)):
        assert not protected_gives_way(skipped=skipped, seconds_away=seconds, **known)
    assert not protected_gives_way(skipped=100, seconds_away=ENCODERS_BACK_SECONDS - 1, **known)
    assert protected_gives_way(skipped=MOST_SKIPPED, seconds_away=ENCODERS_BACK_SECONDS, **known)
    for on_disk, protectable in ((True, True), (False, False)):
        assert protected_gives_way(
            skipped=0, seconds_away=0.0, on_disk=on_disk, protectable=protectable
        )


@given(SLOTS, st.sets(st.integers(0, 3)))
@MANY
def test_a_free_slot_is_taken_first_then_the_oldest_that_nobody_reads(
    slots: list[SlotHeader], read: set[int]
) -> None:
    spared = {slots[i].snapshot for i in read if i < len(slots)} - {None}
    index = oldest_reusable(slots, spared)  # type: ignore[arg-type]
    usable = [s for i, s in enumerate(slots) if may_reuse(slots, i) and s.snapshot not in spared]
    if index is None:
        assert not usable
    elif any(s.state == FREE for s in slots):
        assert slots[index].state == FREE
    else:
        assert slots[index].snapshot == min(s.snapshot for s in usable)  # type: ignore[type-var]


@given(SLOTS)
@MANY
def test_a_trainer_captures_while_any_slot_says_so_even_one_that_is_ending(
    slots: list[SlotHeader],
) -> None:
    aborted = [replace(s, iteration=-1) for s in slots]
    assert capturing(slots) == capturing(aborted) == (CAPTURING in [s.state for s in slots])


def test_a_slot_that_lost_its_iteration_is_ending() -> None:
    for state in SlotState:
        assert not ending(header(state))
        assert ending(header(state, ending=True)) == (state != FREE)


def test_who_writes_where() -> None:
    """The trainer captures; the encoder writes parity, and what it rebuilds."""
    for state, trainer, encoder in product(SlotState, (False, True), (False, True)):
        written = trainer and state == CAPTURING
        written = written or (encoder and state in (ENCODING, REBUILDING))
        assert still_written(state, trainer, encoder) == written


@given(SLOTS, st.data())
@MANY
def test_a_lost_snapshot_makes_room_before_what_is_whole(
    slots: list[SlotHeader], data: st.DataObject
) -> None:
    """It is committed, and nothing can be restored from it: the older one beside it must stay."""
    committed = [s.snapshot for s in slots if s.state == COMMITTED]
    lost = data.draw(st.sampled_from([None, SnapshotId(9, 9), *committed]))
    whole = [s for s in committed if s != lost]
    changed = without_lost(slots, lost)
    index = oldest_reusable(changed)
    if lost in committed and whole:
        assert index is not None and slots[index].snapshot != newest_of(whole)
        spared = without_lost(slots, lost, [lost])
        assert spared == slots, "a reader keeps it"
    else:
        assert changed == slots


def newest_of(snapshots: list[SnapshotId | None]) -> SnapshotId:
    return max(s for s in snapshots if s is not None)


def table(*headers: SlotHeader) -> ShardSlots:
    return ShardSlots(SHARD, list(headers))


@pytest.mark.parametrize("state", SlotState, ids=lambda state: state.name)
def test_what_came_from_disk_is_sealed_only_where_it_was_waited_for(state: SlotState) -> None:
    slots = table(header(state))
    if state == REBUILDING:
        slots.loaded(record_of(TWO, SHARD, 20))
        assert slots.slots == [header(SEALED)]
    else:
        with pytest.raises(TransitionRefusedError, match=SHARD):
            slots.loaded(record_of(TWO, SHARD, 20))
        assert slots.changes == []


def test_another_iteration_from_disk_is_refused() -> None:
    slots = table(header(REBUILDING))
    with pytest.raises(TransitionRefusedError, match="does not wait for"):
        slots.loaded(record_of(TWO, SHARD, 21))
    assert slots.changes == []


def test_a_target_that_was_given_up_never_counts() -> None:
    """The encoder may have written its last byte before it heard of the end."""
    slots = table(header(REBUILDING, ending=True))
    with pytest.raises(TransitionRefusedError, match="given up"):
        slots.rebuilt(TABLE[0], ROOT, TABLE)
    for iteration in (-1, 20):
        with pytest.raises(TransitionRefusedError, match="does not wait for"):
            slots.loaded(record_of(TWO, SHARD, iteration))
    assert slots.changes == []


def test_a_rebuilt_shard_is_as_it_was_but_for_the_commit() -> None:
    slots = table(header(FREE))
    slots.begin_rebuild(TWO, 20)
    assert slots.slots == [header(REBUILDING)]
    slots.rebuilt(TABLE[0], ROOT, TABLE)
    assert slots.slots == [header(SlotState.PROTECTED)]


STEPS = st.lists(st.tuples(st.integers(0, 1), st.none() | headers), max_size=10)


@given(st.lists(headers, min_size=2, max_size=2), STEPS, st.integers(0, 10))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_changes_stored_in_their_order_give_the_table(
    before: list[SlotHeader], steps: list[tuple[int, SlotHeader | None]], taken_after: int
) -> None:
    """Wherever they are taken in between."""
    table, stored, changes = ShardSlots(SHARD, before), list(before), []
    for number, (index, changed) in enumerate(steps):
        if number == taken_after:
            changes += table.take_changes()
        if changed is None:
            table.free(index)
            assert table.slots[index] == EMPTY_SLOT
        else:
            table.put(index, changed)
    changes += table.take_changes()
    for index, changed in changes:
        stored[index] = changed
    assert stored == table.slots and len(changes) == len(steps)
    assert table.take_changes() == []


def test_it_does_not_change_the_list_that_it_was_made_of() -> None:
    before = [header(SEALED)]
    ShardSlots(SHARD, before).free(0)
    assert before == [header(SEALED)]


@pytest.mark.parametrize("state", SlotState, ids=lambda state: state.name)
def test_a_snapshot_is_found_by_its_name_in_every_state(state: SlotState) -> None:
    table = ShardSlots(SHARD, [EMPTY_SLOT, header(state)])
    found = None if state == SlotState.FREE else 1
    assert table.find(TWO) == found and table.find(THREE) is None
    if found is not None:
        assert table.expect(TWO, state) == found


def test_what_is_not_as_expected_is_told_with_shard_and_state() -> None:
    table = ShardSlots(SHARD, [header(SEALED)])
    with pytest.raises(TransitionRefusedError, match="dp0 has no slot with snapshot 1.3"):
        table.expect(THREE, SEALED)
    with pytest.raises(TransitionRefusedError, match="dp0 slot 0 .* is SEALED, not COMMITTED"):
        table.expect(TWO, COMMITTED)
