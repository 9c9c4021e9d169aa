"""The rules that keep a snapshot alive, asked directly."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from test_slots import (
    CAPTURING,
    COMMITTED,
    ENCODING,
    FREE,
    REBUILDING,
    header,
    headers,
)

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.identity import SnapshotId
from megatron_ft.smp.slot_rules import (
    capturing,
    ending,
    may_reuse,
    oldest_reusable,
    still_written,
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
    """That is the newest protected one that is committed, or the newest if none is protected."""
    committed = [s for s in slots if s.state == COMMITTED]
    protected = [s for s in committed if not s.local_only]
    last = newest(protected or committed)
    for index, slot in enumerate(slots):
        given_up = slot.state == FREE or (slot.state == COMMITTED and slot.snapshot != last)
        assert may_reuse(slots, index) == given_up


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
