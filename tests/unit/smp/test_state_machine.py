"""One SMP's decisions: what is stored, who is told, and in which order."""

from __future__ import annotations

import pytest

from megatron_ft.arena.format import Permit, SlotState
from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import PinnedError, StaleIncarnationError, WorldGoneError
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.effects import StorePermit, StoreSlot, ToCoordinator, ToEncoder, ToTrainer
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.supervisor.orders import stripe_orders
from tests.protocol.model.memory import record_of
from tests.support.node_machine import (
    BEGINS,
    COMMIT,
    ENCODE,
    ENCODED,
    GRANT,
    HERE,
    INCARNATION,
    ONE,
    PLACES,
    ROOT,
    SEALED,
    STRIPE,
    TABLE,
    THREE,
    TWO,
    VOID,
    WORLD,
    begin,
    committed_twice,
    machine,
    ok,
    state,
)

ABORT = m.Abort(INCARNATION, ONE, "test")


def test_a_permit_changes_no_slot_until_its_trainer_begins() -> None:
    node = machine()
    node.handle(GRANT)
    assert node.take_effects() == [StorePermit(HERE, Permit(ONE, 10, 0, False))]
    begin(node, GRANT)
    (slot,) = node.take_effects()
    assert isinstance(slot, StoreSlot) and slot.header.state == SlotState.CAPTURING


def test_what_a_permit_promises_stays_when_the_trainer_dies_before_it_begins() -> None:
    node = committed_twice()
    node.trainer_gone(HERE, 1)
    assert [state(node, slot) for slot in (0, 1)] == [SlotState.COMMITTED] * 2
    assert isinstance(node.handle(BEGINS), m.Refused)


@pytest.mark.parametrize("how", ["aborted", "read since", "restarted", "missed"])
def test_a_trainer_that_begins_too_late_is_shown_a_void_permit(how: str) -> None:
    node = committed_twice()
    if how == "aborted":
        ok(node, m.Abort(INCARNATION, THREE, "test"))
    elif how == "read since":
        ok(node, m.Hold(INCARNATION, "drain", ONE))
    elif how == "missed":
        assert ToCoordinator(m.Missed(HERE, THREE)) in ok(node, m.Missed(HERE, THREE))
    else:
        slots, node = node.shards[HERE].slots, machine()
        node.shards[HERE] = ShardSlots(HERE, slots)
    node.take_effects()
    assert isinstance(node.handle(BEGINS), m.Refused)
    assert node.take_effects() == [VOID]
    assert [state(node, slot) for slot in (0, 1)] == [SlotState.COMMITTED] * 2


def test_an_abort_before_the_trainer_begins_tells_that_nothing_is_written() -> None:
    effects = ok(committed_twice(), m.Abort(INCARNATION, THREE, "test"))
    assert VOID in effects and ToCoordinator(m.SlotFreed(HERE, THREE)) in effects


def test_a_late_begin_leaves_a_newer_permit_alone() -> None:
    node = committed_twice()
    four = m.Grant(INCARNATION, SnapshotId(INCARNATION, 4), 16)
    assert node.handle(four) == m.Ok()
    node.take_effects()
    assert isinstance(node.handle(BEGINS), m.Refused) and node.take_effects() == []
    begin(node, four)
    assert state(node) == SlotState.CAPTURING


def test_each_step_is_stored_before_anybody_is_told() -> None:
    node = machine()
    ok(node, GRANT)
    for message, told in (
        (SEALED, ToCoordinator(SEALED)),
        (ENCODE, None),
        (ENCODED, ToCoordinator(ENCODED)),
        (COMMIT, ToTrainer(HERE, m.SnapshotOutcome(ONE, "committed"))),
    ):
        first, second, *_ = ok(node, message)
        assert isinstance(first, StoreSlot)
        assert told in (None, second)
    assert state(node) == SlotState.COMMITTED


def test_the_order_reaches_the_encoder_with_paths_and_slots_after_parity_is_void() -> None:
    node = machine()
    stored, sent = ok(node, GRANT, SEALED, ENCODE)
    assert isinstance(stored, StoreSlot) and not stored.header.parity_valid
    assert isinstance(sent, ToEncoder) and isinstance(sent.body, m.EncodeOrder)
    (stripe,) = sent.body.stripes
    assert (stripe.arenas, stripe.slots) == ({HERE: "/arenas/dp0"}, {HERE: 0})


def test_effects_of_two_messages_keep_their_order() -> None:
    """The first message's effects may still wait when the second one is handled."""
    node = machine()
    ok(node, GRANT, SEALED)
    node.handle(ENCODE)
    node.encoder_gone(WORLD, 1)
    stored = [e.header.state for e in node.take_effects() if isinstance(e, StoreSlot)]
    assert stored == [SlotState.ENCODING, SlotState.SEALED]


def test_a_permit_is_all_or_nothing_on_a_node() -> None:
    node = machine("dp0", "dp3")
    ok(node, GRANT)
    node.handle(m.Missed("dp0", ONE))
    node.take_effects()
    answer = node.handle(m.Grant(INCARNATION, TWO, 12))
    assert isinstance(answer, m.Refused) and "dp3" in answer.reason
    assert node.take_effects() == []


def test_a_permit_that_comes_again_while_it_stands_changes_nothing() -> None:
    node = machine("dp0", "dp3")
    ok(node, GRANT)
    assert ok(node, GRANT) == []


@pytest.mark.parametrize(
    "ended",
    [
        [GRANT, m.Missed(HERE, ONE)],
        [GRANT, m.Missed(HERE, ONE), ABORT],
        [GRANT, ABORT],
        [ABORT],
        [
            GRANT,
            SEALED,
            ENCODE,
            ENCODED,
            COMMIT,
            m.Grant(INCARNATION, TWO, 12),
            m.Missed(HERE, TWO),
        ],
    ],
    ids=["missed", "aborted", "aborted under its trainer", "aborted before it came", "committed"],
)
def test_a_permit_that_comes_after_its_snapshot_was_decided_is_refused(
    ended: list[m.Message],
) -> None:
    """From an older connection: the slot would wait for a capture that nobody makes."""
    node = machine()
    ok(node, *ended)
    before = list(node.shards[HERE].slots)
    assert isinstance(node.handle(GRANT), m.Refused)
    assert node.take_effects() == [] and node.shards[HERE].slots == before


def test_a_permit_from_before_an_smp_was_restarted_is_refused() -> None:
    """What was decided is known from the headers that it adopts."""
    node, older = machine(), machine()
    ok(older, m.Grant(INCARNATION, TWO, 12), m.Sealed(record_of(TWO, HERE, 12)))
    node.shards = older.shards
    node.adopted()
    assert isinstance(node.handle(GRANT), m.Refused)


def test_an_order_to_encode_that_comes_again_changes_nothing() -> None:
    node = machine()
    for message in (ENCODE, ENCODED):
        ok(node, *([GRANT, SEALED] if message is ENCODE else []), message)
        assert ok(node, ENCODE) == []
    assert node.shards[HERE].slots[0].parity_valid


def test_a_part_that_was_not_encoded_is_no_order_that_comes_again() -> None:
    """One of two ranks went back, as its encoder had died: both get their parity."""
    node = machine("dp0", "dp3")
    places = {"dp0": "n0", "dp3": "n0", "dp2": "n2"}
    stripe = StripeState("xor", 2, 1, 128, tuple(places), 64)
    order = m.Encode(INCARNATION, ONE, WORLD, stripe_orders([stripe], places, ["n0", "n2"]))
    ok(node, GRANT, SEALED, m.Sealed(record_of(ONE, "dp3", 10)))
    node.shards["dp0"].begin_encode(ONE)
    node.shards["dp0"].protect(ONE, ROOT, TABLE)
    node.take_effects()
    sent = [e for e in ok(node, order) if isinstance(e, ToEncoder)]
    assert len(sent) == 1
    states = [node.shards[shard].slots[0].state for shard in ("dp0", "dp3")]
    assert states == [SlotState.ENCODING, SlotState.ENCODING]


@pytest.mark.parametrize("message", [GRANT, ENCODE, COMMIT, ABORT, m.Adopt(INCARNATION, (), None)])
@pytest.mark.parametrize("incarnation", [INCARNATION - 1, INCARNATION + 1])
def test_another_incarnation_is_not_obeyed(message: m.Message, incarnation: int) -> None:
    node = NodeMachine("n0", incarnation)
    node.shards[HERE] = ShardSlots(HERE, [EMPTY_SLOT])
    answer = node.handle(message)
    assert isinstance(answer, m.Refused) and isinstance(answer.error, StaleIncarnationError)
    assert node.take_effects() == []


def test_admission_drops_what_was_unfinished_and_every_permit() -> None:
    node = machine()
    ok(node, GRANT)
    node.trainer_gone(HERE, 1)
    node.encoder_gone(WORLD, 2)
    node.take_effects()
    assert node.admit(INCARNATION + 1) is None
    assert StorePermit(HERE, None) in node.take_effects()
    assert state(node) == SlotState.FREE and node.highest_incarnation == INCARNATION + 1


def test_admission_of_what_is_not_higher_is_refused() -> None:
    node = NodeMachine("n0", INCARNATION)
    assert isinstance(node.admit(INCARNATION), m.Refused)


def test_admission_before_the_writers_are_dead_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        machine().admit(INCARNATION + 1)


@pytest.mark.parametrize("restarted", [False, True])
def test_abort_under_a_live_trainer_revokes_and_waits(restarted: bool) -> None:
    """Also an SMP that has only the headers knows which permit it is."""
    node = machine()
    ok(node, GRANT)
    if restarted:
        headers = list(node.shards[HERE].slots)
        node = machine()
        node.shards[HERE] = ShardSlots(HERE, headers)
    effects = ok(node, ABORT)
    assert StorePermit(HERE, Permit(ONE, 10, 0, True)) in effects
    assert ToTrainer(HERE, m.SnapshotOutcome(ONE, "aborted")) in effects
    assert state(node) == SlotState.CAPTURING
    freed = ok(node, SEALED)
    assert state(node) == SlotState.FREE and ToCoordinator(m.SlotFreed(HERE, ONE)) in freed


def test_abort_under_a_live_encoder_waits_for_its_death() -> None:
    """Suspended, it would write old parity into the slot's next snapshot."""
    node = machine()
    ok(node, GRANT, SEALED, ENCODE, ABORT)
    assert state(node) == SlotState.ENCODING
    node.encoder_gone(WORLD, 1)
    assert state(node) == SlotState.FREE
    assert ToCoordinator(m.SlotFreed(HERE, ONE)) in node.take_effects()


def test_abort_of_a_capture_that_is_over_leaves_the_permit_word_alone() -> None:
    node = machine()
    effects = ok(node, GRANT, SEALED, ABORT)
    assert not [e for e in effects if isinstance(e, StorePermit)]
    assert state(node) == SlotState.FREE


def test_a_dead_trainer_frees_its_slot_and_the_coordinator_hears_of_it() -> None:
    node = machine()
    ok(node, GRANT)
    node.trainer_gone(HERE, 5)
    stored, told = node.take_effects()
    assert isinstance(stored, StoreSlot) and stored.header == EMPTY_SLOT
    assert told == ToCoordinator(m.WriterGone("trainer", HERE, 5))
    late = node.handle(SEALED)
    assert isinstance(late, m.Refused) and state(node) == SlotState.FREE


def test_a_missed_permit_is_passed_on_once() -> None:
    node = machine()
    ok(node, GRANT)
    assert ToCoordinator(m.Missed(HERE, ONE)) in ok(node, m.Missed(HERE, ONE))
    assert ok(node, m.Missed(HERE, ONE)) == []


def test_an_encoder_of_another_world_moves_nothing() -> None:
    node = machine()
    ok(node, GRANT, SEALED, ENCODE)
    node.encoder_gone(WORLD, 1)
    node.encoder_joined("w4")
    node.take_effects()
    for message in (ENCODED, ENCODE):
        answer = node.handle(message)
        assert isinstance(answer, m.Refused) and isinstance(answer.error, WorldGoneError)
    assert state(node) == SlotState.SEALED


def test_no_order_and_no_result_of_another_world_is_taken() -> None:
    node = machine()
    (lost,) = stripe_orders([STRIPE], PLACES, list(PLACES.values()), {STRIPE: (HERE,)})
    ok(node, GRANT, SEALED, ENCODE, ENCODED, COMMIT)
    ok(node, m.Rebuild(INCARNATION, TWO, 12, WORLD, (lost,)))
    before = list(node.shards[HERE].slots)
    two = record_of(TWO, HERE, 12)
    for message in (
        m.Rebuild(INCARNATION, ONE, 10, "w2", (lost,)),
        m.Rebuilt(TWO, "w2", HERE, two, ROOT, TABLE, 0, 0.0),
        m.Loaded("w2", two),
    ):
        answer = node.handle(message)
        assert isinstance(answer, m.Refused) and isinstance(answer.error, WorldGoneError), message
        assert node.take_effects() == [] and node.shards[HERE].slots == before


def test_encoding_is_refused_while_a_shard_is_captured() -> None:
    node = machine()
    ok(node, GRANT)
    answer = node.handle(ENCODE)
    assert isinstance(answer, m.Refused) and "CAPTURING" in answer.reason
    assert not [e for e in node.take_effects() if isinstance(e, ToEncoder)]


def test_commit_is_refused_when_a_shard_does_not_hold_it() -> None:
    node = machine("dp0", "dp3")
    ok(node, GRANT, SEALED)
    answer = node.handle(m.Commit(INCARNATION, ONE, "local"))
    assert isinstance(answer, m.Refused) and "dp3" in answer.reason


def test_adopt_forgets_what_is_off_the_lineage() -> None:
    node = machine()
    ok(node, GRANT, SEALED, m.Commit(INCARNATION, ONE, "local"), m.Grant(INCARNATION, TWO, 12))
    node.trainer_gone(HERE, 1)
    node.encoder_gone(WORLD, 1)
    node.admit(INCARNATION + 1)
    lineage = (Ancestor(INCARNATION, None), Ancestor(INCARNATION + 1, ONE))
    ok(node, m.Adopt(INCARNATION + 1, lineage, ONE))
    assert state(node) == SlotState.COMMITTED
    ok(node, m.Adopt(INCARNATION + 1, (Ancestor(INCARNATION + 1, None),), None))
    assert state(node) == SlotState.FREE


def test_a_rebuild_target_is_protected_when_its_digests_match() -> None:
    node = machine()
    (order,) = stripe_orders([STRIPE], PLACES, list(PLACES.values()), {STRIPE: (HERE,)})
    stored, sent = ok(node, m.Rebuild(INCARNATION, ONE, 10, WORLD, (order,)))
    assert isinstance(stored, StoreSlot) and stored.header.state == SlotState.REBUILDING
    assert isinstance(sent, ToEncoder) and isinstance(sent.body, m.RebuildOrder)
    ok(node, m.Rebuilt(ONE, WORLD, HERE, TABLE[0], ROOT, TABLE, 0, 0.0))
    assert state(node) == SlotState.PROTECTED and node.shards[HERE].slots[0].parity_valid


def test_a_survivor_without_the_snapshot_refuses_to_rebuild() -> None:
    (order,) = stripe_orders([STRIPE], PLACES, list(PLACES.values()), {STRIPE: ("dp1",)})
    answer = machine().handle(m.Rebuild(INCARNATION, ONE, 10, WORLD, (order,)))
    assert isinstance(answer, m.Refused) and HERE in answer.reason


def test_an_interrupted_rebuild_leaves_nothing() -> None:
    node = machine()
    (order,) = stripe_orders([STRIPE], PLACES, list(PLACES.values()), {STRIPE: (HERE,)})
    ok(node, m.Rebuild(INCARNATION, ONE, 10, WORLD, (order,)))
    node.encoder_gone(WORLD, 1)
    assert state(node) == SlotState.FREE


def held(*shards: str) -> NodeMachine:
    """Two committed snapshots in two slots: the next permit needs the slot of the older."""
    node = machine(*shards)
    for snapshot, iteration in ((ONE, 10), (TWO, 12)):
        ok(node, m.Grant(INCARNATION, snapshot, iteration))
        for shard in shards or (HERE,):
            ok(node, m.Sealed(record_of(snapshot, shard, iteration)))
        ok(node, m.Commit(INCARNATION, snapshot, "local"))
    return node


@pytest.mark.parametrize(
    ("pin", "unpin"),
    [
        (m.Pin("r", ONE, 1), m.Unpin("r")),
        (m.Hold(INCARNATION, "r", ONE), m.Unhold(INCARNATION, "r")),
        (m.Pin("r", ONE, 1), None),
    ],
    ids=["reader", "coordinator", "reader dies"],
)
def test_a_pinned_snapshot_keeps_its_slot(pin: m.Message, unpin: m.Message | None) -> None:
    node = held("dp0", "dp3")
    assert ok(node, pin) == [] and node.held_back()
    answer = node.handle(m.Grant(INCARNATION, THREE, 14))
    assert isinstance(answer, m.Refused) and isinstance(answer.error, PinnedError)
    if unpin is None:
        node.reader_gone("r")
    else:
        ok(node, unpin)
    assert not node.held_back()
    ok(node, m.Grant(INCARNATION, THREE, 14))


def test_one_shard_that_is_read_holds_the_node_back() -> None:
    node = held("dp0", "dp3")
    ok(node, m.Pin("r", ONE, 1))
    node.shards["dp3"].forget(lambda snapshot: snapshot == ONE)
    node.take_effects()
    assert node.held_back()
    answer = node.handle(m.Grant(INCARNATION, THREE, 14))
    assert isinstance(answer, m.Refused) and isinstance(answer.error, PinnedError)


def test_a_pin_is_all_or_nothing_on_a_node() -> None:
    node = held("dp0", "dp3")
    node.shards["dp3"].forget(lambda snapshot: snapshot == ONE)
    node.take_effects()
    answer = node.handle(m.Pin("r", ONE, 1))
    assert isinstance(answer, m.Refused) and "dp3" in answer.reason
    assert node.readers() == []


def test_a_new_incarnation_voids_pins() -> None:
    node = held()
    ok(node, m.Pin("r", ONE, 1))
    node.trainer_gone(HERE, 1)
    node.encoder_gone(WORLD, 2)
    assert node.admit(INCARNATION + 1) is None
    assert node.readers() == [] and not node.held_back()
    ok(node, m.Unpin("r"))


def test_a_node_that_waits_for_its_trainer_is_not_held_back() -> None:
    node = held("dp0", "dp3")
    ok(node, m.Grant(INCARNATION, THREE, 14), m.Missed("dp0", THREE), m.Pin("r", TWO, 1))
    assert not node.held_back(), "dp3 still captures, whoever reads"


RECORD = record_of(ONE, HERE, 10)
LOAD = m.Load(INCARNATION, ONE, 10, (HERE,))
LOADED = m.Loaded(WORLD, RECORD)


def test_a_shard_from_disk_is_lost_until_its_loader_says_that_it_is_there() -> None:
    node = machine()
    assert ok(node, LOAD) == [StoreSlot(HERE, 0, node.shards[HERE].slots[0])]
    assert state(node) == SlotState.REBUILDING
    assert isinstance(node.handle(m.Loaded("w2", RECORD)), m.Refused), "of a world that is gone"
    ok(node, LOADED)
    slot = node.shards[HERE].slots[0]
    assert (slot.state, slot.record, slot.parity_valid) == (SlotState.SEALED, RECORD, False)
    assert isinstance(node.handle(LOADED), m.Refused), "said once"
    ok(node, m.Commit(INCARNATION, ONE, "local"))
    assert state(node) == SlotState.COMMITTED and node.shards[HERE].slots[0].local_only


def test_a_loader_that_dies_leaves_a_free_slot() -> None:
    node = machine()
    ok(node, LOAD)
    node.encoder_gone(WORLD, 1)
    assert state(node) == SlotState.FREE
    node.encoder_joined("w4")
    assert isinstance(node.handle(m.Loaded("w4", RECORD)), m.Refused)
