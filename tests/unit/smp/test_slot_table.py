"""The table of headers: finding snapshots in it, and the order of its changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import TransitionRefusedError
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.smp.slots import ShardSlots
from tests.support.slot_samples import COMMITTED, SEALED, SHARD, THREE, TWO, header, headers

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
