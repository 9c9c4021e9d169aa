"""Which snapshot is served: against a rule of one line, over random states of all arenas."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint.decide import decide
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId, on_lineage
from tests.protocol.model.memory import MemoryArena
from tests.support.decisions import (
    ITERATION,
    LINEAGE,
    NEW,
    OLD,
    ROLLED_BACK,
    SHARDS,
    STRIPES,
    arena,
    decided,
    everywhere,
    header,
    inventories,
)


@pytest.mark.parametrize("state", [SlotState.SEALED, SlotState.PROTECTED, SlotState.COMMITTED])
def test_the_newest_complete_one_is_served_whatever_commit_words_say(state: SlotState) -> None:
    decision = decided(everywhere(state))
    assert (decision.snapshot, decision.iteration, decision.lost) == (NEW, ITERATION, {})
    assert decision.protected == (state != SlotState.SEALED)


def test_a_lost_shard_is_rebuilt_when_its_stripe_has_parity() -> None:
    arenas = everywhere()
    del arenas["dp1"]
    decision = decided(arenas, shard_count=6)
    assert decision.snapshot == NEW and decision.lost == {STRIPES[0]: ("dp1",)}
    assert decision.protected


def test_two_losses_in_two_stripes_are_one_in_each() -> None:
    arenas = everywhere()
    del arenas["dp1"], arenas["dp3"]
    assert decided(arenas, shard_count=6).lost == {STRIPES[0]: ("dp1",), STRIPES[1]: ("dp3",)}


def test_two_losses_in_one_stripe_are_explained() -> None:
    arenas = everywhere()
    del arenas["dp0"], arenas["dp1"]
    decision = decided(arenas, shard_count=6)
    assert decision.snapshot is None
    assert "dp0, dp1" in decision.explanation and "parity for 1" in decision.explanation


def test_without_parity_a_loss_falls_back_to_the_protected_one() -> None:
    arenas = everywhere(SlotState.SEALED)
    del arenas["dp5"]
    decision = decided(arenas, shard_count=6)
    assert decision.snapshot == OLD and decision.lost == {STRIPES[1]: ("dp5",)}


def test_one_survivor_without_parity_is_enough_to_fall_back() -> None:
    arenas = everywhere(SlotState.PROTECTED)
    arenas["dp0"].slots[1].header = header("dp0", NEW, SlotState.SEALED)
    del arenas["dp1"]
    assert decided(arenas, shard_count=6).snapshot == OLD


@pytest.mark.parametrize("state", [SlotState.CAPTURING, SlotState.REBUILDING, SlotState.FREE])
def test_what_was_not_finished_counts_as_lost(state: SlotState) -> None:
    arenas = everywhere()
    arenas["dp1"].slots[1].header = header("dp1", NEW, state)
    assert decided(arenas).lost == {STRIPES[0]: ("dp1",)}


def test_parity_that_was_being_written_is_void() -> None:
    arenas = everywhere(SlotState.PROTECTED)
    arenas["dp0"].slots[1].header = header("dp0", NEW, SlotState.ENCODING, parity=True)
    decision = decided(arenas)
    assert decision.snapshot == NEW and not decision.protected
    del arenas["dp1"]
    assert decided(arenas, shard_count=6).snapshot == OLD


def test_what_was_rolled_back_is_not_served() -> None:
    decision = decided(everywhere(snapshot=ROLLED_BACK))
    assert decision.snapshot == OLD


def test_the_newest_arena_knows_the_lineage() -> None:
    """One arena has heard of the new incarnation, the others were interrupted before."""
    arenas = everywhere(snapshot=ROLLED_BACK)
    for shard in SHARDS[1:]:
        arenas[shard] = replace(arenas[shard], incarnation=1, lineage=LINEAGE[:1])
    assert decided(arenas).snapshot == OLD


def test_the_notes_know_a_lineage_that_no_arena_found_has() -> None:
    """A node was away when the job was rolled back, and is all that is left."""
    arenas = everywhere()
    newest = decided(arenas).snapshot
    assert newest is not None
    given_up = (*LINEAGE[:1], Ancestor(LINEAGE[-1].incarnation + 1, SnapshotId(1, 0)))
    assert decided(arenas, lineage=given_up).snapshot != newest
    assert decided(arenas, lineage=LINEAGE[:1]).snapshot == newest, "older notes count for nothing"


def test_the_older_of_two_claims_owns_nothing() -> None:
    """A node came back with what it had: its shard has lived elsewhere since."""
    arenas = everywhere()
    stale = arena("dp1", header("dp1", OLD, SlotState.COMMITTED), incarnation=1)
    for order in ([stale, *arenas.values()], [*arenas.values(), stale]):
        decision = decide(inventories(*order))
        assert decision.snapshot == NEW and decision.lost == {}
        assert decision.holdings["dp1"].node == "dp1-2"


def test_a_returning_node_may_be_read_when_nobody_else_claims_its_shard() -> None:
    arenas = everywhere()
    arenas["dp1"] = arena("dp1", header("dp1", NEW, SlotState.COMMITTED), incarnation=1)
    assert decided(arenas).lost == {}


def _with_root(slot: SlotHeader, root: bytes) -> SlotHeader:
    assert slot.record is not None
    other = msgspec.structs.replace(slot.record, digest_root=root.ljust(32))
    return replace(slot, record=other, stripe_table=_own(slot.stripe_table, other))


def _own(table: tuple[SealedRecord, ...], record: SealedRecord) -> tuple[SealedRecord, ...]:
    return tuple(record if r.shard_id == record.shard_id else r for r in table)


@pytest.mark.parametrize("member", ["dp0", "dp1", "dp2"])
def test_bytes_that_the_peers_do_not_vouch_for_count_as_lost(member: str) -> None:
    """Its own table agrees with it; that of its peers decides."""
    arenas = everywhere()
    slot = arenas[member].slots[1]
    slot.header = _with_root(slot.header, b"other")
    decision = decided(arenas)
    # The odd one vouches for its peers as they are, they do not vouch for it.
    assert decision.snapshot == NEW and decision.lost == {STRIPES[0]: (member,)}


def test_corrupt_shards_count_as_lost_for_that_snapshot_only() -> None:
    decision = decided(everywhere(), corrupt={("dp1", NEW)})
    assert decision.snapshot == NEW and decision.lost == {STRIPES[0]: ("dp1",)}
    decision = decided(everywhere(), corrupt={("dp1", NEW), ("dp2", NEW)})
    assert decision.snapshot == OLD and decision.lost == {}


def test_shard_count_finds_a_stripe_without_survivors() -> None:
    arenas = everywhere()
    for shard in STRIPES[1].members:
        del arenas[shard]
    assert decided(arenas).snapshot == NEW  # nobody knows of the other stripe
    decision = decided(arenas, shard_count=6)
    assert decision.snapshot is None and "3 of 6 shards" in decision.explanation


def test_nothing_anywhere() -> None:
    decision = decide([])
    assert decision.snapshot is None and "no arena holds" in decision.explanation


slot_states = st.sampled_from([s for s in SlotState if s != SlotState.ENCODING])
snapshots = st.sampled_from([OLD, ROLLED_BACK, NEW, SnapshotId(2, 2)])


@st.composite
def random_arenas(draw: st.DrawFn) -> dict[str, MemoryArena]:
    arenas = {}
    for shard in SHARDS:
        if draw(st.integers(0, 9)):
            wanted = draw(st.lists(snapshots, min_size=2, max_size=3, unique=True))
            headers = [
                header(shard, s, draw(slot_states), parity=draw(st.sampled_from([None, False])))
                for s in wanted
            ]
            arenas[shard] = arena(shard, *headers)
    return arenas


def servable(arenas: dict[str, MemoryArena], snapshot: SnapshotId) -> bool:
    """The rule, as DESIGN puts it: at most m lack it and parity is complete, or none lacks it."""
    good = (SlotState.SEALED, SlotState.PROTECTED, SlotState.COMMITTED)
    held = {
        a.shard: h
        for a in arenas.values()
        for h in a.headers()
        if h.snapshot == snapshot and h.state in good
    }
    for stripe in STRIPES:
        there = [held[shard] for shard in stripe.members if shard in held]
        lacking = len(stripe.members) - len(there)
        if lacking and (lacking > 1 or not all(h.parity_valid for h in there)):
            return False
    return on_lineage(snapshot, LINEAGE)


@given(random_arenas())
@settings(max_examples=400, derandomize=True, deadline=None)
def test_the_newest_that_can_be_served_and_nothing_else(arenas: dict[str, MemoryArena]) -> None:
    decision = decided(arenas, shard_count=6)
    known = {h.snapshot for a in arenas.values() for h in a.headers() if h.snapshot is not None}
    possible = [s for s in sorted(known) if servable(arenas, s)]
    assert decision.snapshot == (possible[-1] if possible else None)
    if decision.snapshot is not None:
        lost = {shard for members in decision.lost.values() for shard in members}
        for shard in set(SHARDS) - lost:
            slot = decision.holdings[shard].slot(decision.snapshot)
            assert slot is not None and slot.snapshot == decision.snapshot
