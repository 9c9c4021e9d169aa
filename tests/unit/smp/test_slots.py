"""Slots of one arena: which transitions exist, which are refused, and what is never given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import PinnedError, TransitionRefusedError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.smp.slot_rules import ending
from megatron_ft.smp.slots import ShardSlots
from tests.protocol.model.memory import record_of
from tests.support.slot_samples import (
    CAPTURING,
    COMMITTED,
    ENCODING,
    FREE,
    ONE,
    PROTECTED,
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


def slots(*headers: SlotHeader) -> ShardSlots:
    return ShardSlots(SHARD, list(headers))


def states(machine: ShardSlots) -> list[SlotState]:
    return [slot.state for slot in machine.slots]


# Every request in every state: the state that it leads to, or None where it is refused.

REQUESTS: dict[str, Callable[[ShardSlots], object]] = {
    "seal": lambda s: s.seal(record_of(TWO, SHARD, 20)),
    "begin_encode": lambda s: s.begin_encode(TWO),
    "protect": lambda s: s.protect(TWO, ROOT, TABLE),
    "commit": lambda s: s.commit(TWO, local_only=False),
    "commit local": lambda s: s.commit(TWO, local_only=True),
    "abort": lambda s: s.abort(TWO, trainer_alive=False, encoder_alive=False),
    "begin_rebuild": lambda s: s.begin_rebuild(TWO, 20),
    "rebuilt": lambda s: s.rebuilt(TABLE[0], ROOT, TABLE),
    "capture_ended": lambda s: s.capture_ended(TWO),
    "encoder_gone": lambda s: s.encoder_gone(),
    "forget": lambda s: s.forget(lambda snapshot: snapshot == TWO),
}
TARGETS: dict[str, dict[SlotState, SlotState]] = {
    "seal": {CAPTURING: SEALED},
    "begin_encode": {SEALED: ENCODING, PROTECTED: ENCODING},
    "protect": {ENCODING: PROTECTED},
    "commit": {PROTECTED: COMMITTED, COMMITTED: COMMITTED},
    "commit local": {SEALED: COMMITTED, PROTECTED: COMMITTED, COMMITTED: COMMITTED},
    "abort": {state: FREE for state in SlotState if state != COMMITTED},
    "begin_rebuild": {state: REBUILDING for state in SlotState},
    "rebuilt": {REBUILDING: PROTECTED},
    "capture_ended": {state: FREE if state == CAPTURING else state for state in SlotState},
    "encoder_gone": {
        state: {ENCODING: SEALED, REBUILDING: FREE}.get(state, state) for state in SlotState
    },
    "forget": {state: FREE for state in SlotState},
}


@pytest.mark.parametrize("state", SlotState, ids=lambda state: state.name)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_request_in_every_state(request_name: str, state: SlotState) -> None:
    machine = slots(header(state))
    before = list(machine.slots)
    target = TARGETS[request_name].get(state)
    if target is None:
        with pytest.raises(TransitionRefusedError, match=SHARD):
            REQUESTS[request_name](machine)
        assert (machine.slots, machine.changes) == (before, [])
    else:
        REQUESTS[request_name](machine)
        assert states(machine) == [target]
        assert [h for _, h in machine.changes][-1:] in ([], [machine.slots[0]])


def test_parity_is_void_before_its_first_byte_and_after_its_encoder_died() -> None:
    machine = slots(header(PROTECTED))
    machine.begin_encode(TWO)
    machine.encoder_gone()
    for _, stored in machine.take_changes():
        assert (stored.parity_valid, stored.stripe_table) == (False, ())
        assert stored.record is not None
    assert machine.take_changes() == []


def test_encode_is_refused_while_another_world_encodes() -> None:
    with pytest.raises(TransitionRefusedError, match="another world"):
        slots(header(ENCODING)).begin_encode(TWO)


def test_local_commit_never_lowers_a_protected_one() -> None:
    machine = slots(header(COMMITTED))
    machine.commit(TWO, local_only=True)
    assert not machine.slots[0].local_only and machine.changes == []


def test_protected_commit_raises_a_local_one() -> None:
    machine = slots(replace(header(COMMITTED), local_only=True))
    machine.commit(TWO, local_only=False)
    assert not machine.slots[0].local_only


def test_protect_stores_the_table_of_the_whole_stripe() -> None:
    machine = slots(header(ENCODING))
    machine.protect(TWO, ROOT, TABLE)
    assert machine.slots[0].stripe_table == TABLE and machine.slots[0].parity_valid


# Reuse.


@pytest.mark.parametrize(
    "older, newer, index",
    [
        (header(COMMITTED, ONE), header(COMMITTED, TWO), 0),
        (header(COMMITTED, ONE), header(COMMITTED, TWO, local=True), None),
        (header(COMMITTED, ONE, local=True), header(COMMITTED, TWO, local=True), 0),
        (header(COMMITTED, ONE, local=True), header(COMMITTED, TWO), 0),
        (header(COMMITTED, ONE), header(SEALED, TWO), None),
        (header(COMMITTED, ONE), header(PROTECTED, TWO), None),
        (header(COMMITTED, ONE), header(ENCODING, TWO), None),
        (header(COMMITTED, ONE), header(REBUILDING, TWO), None),
        (header(COMMITTED, ONE), header(FREE), 1),
    ],
)
def test_which_slot_is_given_up(older: SlotHeader, newer: SlotHeader, index: int | None) -> None:
    assert slots(older, newer).victim() == index
    mirrored = None if index is None else 1 - index
    assert slots(newer, older).victim() == mirrored


def test_a_new_permit_waits_until_the_last_capture_has_ended() -> None:
    """There is one permit word: a second permit would hide that the first was revoked."""
    machine = slots(header(COMMITTED, ONE), header(CAPTURING, TWO), header(FREE))
    machine.abort(TWO, trainer_alive=True, encoder_alive=False)
    assert machine.victim() == 2 and not machine.may_grant()
    with pytest.raises(TransitionRefusedError, match="no free slot"):
        machine.grant(THREE, 30)
    machine.capture_ended(TWO)
    assert machine.grant(THREE, 30) == 1


@given(st.lists(headers, min_size=1, max_size=4, unique_by=lambda h: h.snapshot or id(h)))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_grant_leaves_what_must_stay(before: list[SlotHeader]) -> None:
    """In doubt: untouched.  Committed: the newest protected stays, and at least one at all."""
    machine = slots(*before)
    if not machine.may_grant():
        return
    index = machine.grant(SnapshotId(4, 1), 99)
    gone = before[index]
    assert gone.state in (FREE, COMMITTED)
    committed = [h for h in before if h.state == COMMITTED]
    left = [h for h in machine.slots if h.state == COMMITTED]
    assert bool(left) == bool(committed) or gone.state == FREE
    protected = [h.snapshot for h in committed if not h.local_only]
    if protected:
        assert max(protected) in [h.snapshot for h in left]  # type: ignore[type-var]
    elif committed:
        newest = max(h.snapshot for h in committed)  # type: ignore[type-var]
        assert newest in [h.snapshot for h in left]


# Readers.


@pytest.mark.parametrize("state", SlotState, ids=lambda state: state.name)
def test_only_what_is_complete_can_be_pinned(state: SlotState) -> None:
    machine = slots(header(state))
    if state in (SEALED, PROTECTED, COMMITTED):
        machine.pin("r", TWO)
        assert machine.pins == {"r": TWO}
    else:
        with pytest.raises(TransitionRefusedError, match=SHARD):
            machine.pin("r", TWO)
        assert machine.pins == {}


def test_a_pinned_slot_is_granted_only_after_its_last_reader() -> None:
    machine = slots(header(COMMITTED, ONE), header(COMMITTED, TWO))
    machine.pin("a", ONE)
    machine.pin("b", ONE)
    for reader in ("a", "b"):
        assert machine.held_back() and not machine.may_grant()
        with pytest.raises(PinnedError, match="being read"):
            machine.grant(THREE, 30)
        machine.unpin(reader)
    assert not machine.held_back() and machine.grant(THREE, 30) == 0


def test_a_third_slot_lets_captures_go_on_beside_a_reader() -> None:
    machine = slots(header(COMMITTED, ONE), header(COMMITTED, TWO), header(FREE))
    machine.pin("r", ONE)
    assert not machine.held_back() and machine.grant(THREE, 30) == 2


def test_a_reader_is_not_blamed_for_what_waits_anyway() -> None:
    machine = slots(header(COMMITTED, ONE), header(ENCODING, TWO))
    machine.pin("r", ONE)
    assert not machine.held_back() and not machine.may_grant()


def test_rebuild_and_rollback_wait_for_no_reader() -> None:
    machine = slots(header(COMMITTED, ONE), header(COMMITTED, TWO))
    machine.pin("r", ONE)
    assert machine.begin_rebuild(THREE, 30) == 0
    machine.pin("r", TWO)
    machine.forget(lambda snapshot: snapshot == TWO)
    assert states(machine) == [REBUILDING, FREE]


@given(
    st.lists(headers, min_size=1, max_size=4, unique_by=lambda h: h.snapshot or id(h)),
    st.sets(st.integers(0, 3)),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_no_grant_takes_what_is_pinned(before: list[SlotHeader], read: set[int]) -> None:
    """And with pins a grant is possible only where it was without them."""
    machine, alone = slots(*before), slots(*before)
    for index in read & set(range(len(before))):
        snapshot = before[index].snapshot
        if snapshot is not None and before[index].state in (SEALED, PROTECTED, COMMITTED):
            machine.pin(str(index), snapshot)
    assert (machine.may_grant() or machine.held_back()) == alone.may_grant()
    if machine.may_grant():
        assert before[machine.grant(SnapshotId(4, 1), 99)].snapshot not in machine.pins.values()


# Abort under a live writer.


@pytest.mark.parametrize(
    "state, trainer, encoder, freed",
    [
        (CAPTURING, True, False, False),
        (CAPTURING, False, True, True),
        (ENCODING, False, True, False),
        (ENCODING, True, False, True),
        (REBUILDING, False, True, False),
        (SEALED, True, True, True),
        (PROTECTED, True, True, True),
    ],
)
def test_abort_frees_a_slot_only_when_nobody_writes(
    state: SlotState, trainer: bool, encoder: bool, freed: bool
) -> None:
    machine = slots(header(state))
    assert machine.abort(TWO, trainer_alive=trainer, encoder_alive=encoder) == freed
    assert (machine.slots[0].state == FREE) == freed
    assert ending(machine.slots[0]) != freed


@pytest.mark.parametrize("restart", [False, True])
def test_an_aborted_capture_is_never_sealed(restart: bool) -> None:
    """Also not when the SMP was restarted in between: the mark is in the header."""
    machine = slots(header(CAPTURING))
    machine.abort(TWO, trainer_alive=True, encoder_alive=False)
    if restart:
        machine = slots(*machine.slots)
    assert machine.seal(record_of(TWO, SHARD, 20)) is False
    assert states(machine) == [FREE]


def test_an_aborted_encoding_is_free_when_its_encoder_is_dead() -> None:
    machine = slots(header(ENCODING))
    machine.abort(TWO, trainer_alive=True, encoder_alive=True)
    assert machine.encoder_gone() == [TWO]
    assert states(machine) == [FREE]


def test_an_aborted_encoding_is_never_protected() -> None:
    """Its encoder may be done before it hears of the end."""
    machine = slots(header(ENCODING))
    machine.abort(TWO, trainer_alive=True, encoder_alive=True)
    with pytest.raises(TransitionRefusedError, match="given up"):
        machine.protect(TWO, bytes(32), ())
    assert machine.encoder_gone() == [TWO]


def test_abort_is_refused_after_commit_and_nothing_without_a_slot() -> None:
    with pytest.raises(TransitionRefusedError, match="committed already"):
        slots(header(COMMITTED)).abort(TWO, trainer_alive=False, encoder_alive=False)
    assert slots(header(FREE)).abort(TWO, trainer_alive=True, encoder_alive=True)


def test_rebuild_takes_the_slot_of_the_same_snapshot_first() -> None:
    machine = slots(header(FREE), header(COMMITTED, TWO))
    assert machine.begin_rebuild(TWO, 20) == 1
    assert machine.slots[1].record is None, "a target counts as lost until its digests match"


def test_rebuild_is_refused_where_nothing_may_go() -> None:
    machine = slots(header(COMMITTED, ONE), header(SEALED, THREE))
    with pytest.raises(TransitionRefusedError, match="no slot to rebuild"):
        machine.begin_rebuild(TWO, 20)
