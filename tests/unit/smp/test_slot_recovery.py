"""What only a recovery changes of slots; test_slots.py asks for each transition in each state."""

from __future__ import annotations

import pytest

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import TransitionRefusedError
from megatron_ft.smp.slots import ShardSlots
from tests.protocol.model.memory import record_of
from tests.support.slot_samples import (
    FREE,
    REBUILDING,
    ROOT,
    SEALED,
    SHARD,
    TABLE,
    TWO,
    header,
)


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
