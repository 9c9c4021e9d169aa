"""Decisions when a node shall leave a job, or is lost: Seats, and the Seating of a request."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import SnapshotId
from megatron_ft.supervisor.cycle import SnapshotEnded
from megatron_ft.supervisor.evacuation import Seating, boundaries_ahead, loss_of_move
from megatron_ft.supervisor.seats import Seats, nodes_to_replace
from megatron_ft.supervisor.spec import JobSpec

NAMES = [f"n{i}" for i in range(8)]
SOME = st.sets(st.sampled_from(NAMES))
ACTIVE = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)


@given(ACTIVE, SOME, SOME, st.integers(0, 4))
def test_lost_nodes_come_first_and_nobody_leaves_without_a_spare(
    active: list[str], lost: set[str], leaving: set[str], spares: int
) -> None:
    found = nodes_to_replace(active, lost, leaving, spares)
    gone = [node for node in active if node in lost]
    assert found[: len(gone)] == gone
    willing = found[len(gone) :]
    assert set(willing) <= (leaving & set(active)) - lost
    assert len(found) == len(set(found)) and (not willing or len(found) <= spares)
    # As many leave as can.
    stay = (leaving & set(active)) - set(found)
    assert not stay or len(found) >= spares


@given(
    ACTIVE, SOME, SOME, SOME, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(NAMES)
)
def test_a_node_with_ranks_leaves_only_for_a_spare_that_stays_or_for_fewer(
    active: list[str],
    spares: set[str],
    wanted: set[str],
    fewer: set[str],
    redundant: bool,
    paused: bool,
    stopping: bool,
    node: str,
) -> None:
    given = (active, NAMES, spares - set(active), wanted, redundant, paused, stopping, fewer)
    seating = Seating(*given)
    reason = seating.against(node)
    if node in active and not reason:
        assert redundant and not paused and not stopping
        assert set(seating.spares) - wanted or fewer
    if (set(seating.spares) - wanted or fewer) and redundant and not paused and not stopping:
        assert not reason
    assert "no such node" in seating.against("nobody")


def test_a_reason_says_which_spare_shall_leave_too() -> None:
    seating = Seating(["n0"], NAMES, ["n1"], ["n0", "n1"], True, False, False)
    assert seating.against("n0") == "no spare is left: n1 shall leave, too"
    assert seating.against("n1") == "", "it has no ranks"
    assert replace(seating, spares=[]).against("n0") == "no spare is left"
    alone = replace(seating, spares=[], not_fewer=["2 nodes: TP 4 needs 4 ranks"])
    assert alone.against("n0") == "no spare is left; not with 2 nodes: TP 4 needs 4 ranks"


@given(st.floats(0.01, 2.0), st.floats(1e-6, 100) | st.just(0.0))
def test_a_boundary_lies_at_least_so_far_ahead(seconds: float, iteration: float) -> None:
    ahead = boundaries_ahead(seconds, iteration)
    assert ahead * iteration >= seconds * 0.999 if iteration > 0 else ahead == 0
    assert ahead == 0 or (ahead - 1) * iteration <= seconds


IDS = st.builds(SnapshotId, st.integers(1, 3), st.integers(1, 3))
LEVELS = st.sampled_from(["protected", "local", "aborted"])


@given(IDS, st.integers(1, 5), LEVELS, st.integers(0, 7), IDS | st.none(), st.booleans())
def test_ranks_move_only_when_nothing_is_lost_by_it(
    snapshot: SnapshotId,
    iteration: int,
    level: str,
    reached: int,
    survives: SnapshotId | None,
    redundant: bool,
) -> None:
    """A job without parity needs none to grow: no node leaves."""
    reason = loss_of_move(SnapshotEnded(snapshot, iteration, level), reached, survives, redundant)
    enough = level == "protected" or (level == "local" and not redundant)
    nothing_lost = enough and reached <= iteration and survives == snapshot
    assert (reason == "") == nothing_lost


SPEC = JobSpec(name="j", command=("x",), nodes=3, settings=SnapshotConfig(protect="none"))
MOVES = st.lists(
    st.tuples(
        st.sampled_from("evacuate take_back exclude resort set_aside moved replaced".split()),
        st.sampled_from(NAMES[:6]),
    ),
    max_size=8,
)


def seated(moves: list[tuple[str, str]]) -> Seats:
    """Seats of three nodes and up to three spares after some decisions."""
    seats = Seats(SPEC, tuple(NAMES[:3]))
    for move, node in moves:
        if move == "moved":
            seats = seats.moved()
        elif move == "replaced":
            seats = seats.replaced({} if node in seats.active else {seats.active[0]: node})
        elif move == "resort":
            seats = seats.exclude(node, last_resort=True)
        else:
            seats = getattr(seats, move)(node)
    return seats


@given(MOVES, st.sets(st.sampled_from(NAMES[:6])))
@example([("evacuate", "n0"), ("replaced", "n3")], {"n0", "n1", "n2"})
def test_seats_replace_each_lost_node_in_its_position_if_there_are_spares(
    moves: list[tuple[str, str]], there: set[str]
) -> None:
    seats, nodes = seated(moves), sorted(there)
    lost, spares = seats.lost(nodes), seats.substitutes(nodes)
    assert not {*spares} & {*seats.active} and {*spares} <= there
    assert {*lost} == {*seats.active} - {*seats.usable(nodes)}
    if len(spares) < len(lost):
        # Not even those that shall not train would do.
        rest = there - {*seats.active} - seats.aside
        assert len(rest - (seats.leaving - seats.moving - seats.last_resort)) < len(lost)
        return
    after = seats.replaced(seats.replacements(lost, spares, []))
    assert len({*after.active}) == len(after.active) == 3
    assert not {*after.active} & {*lost}, "a lost node trains no more"
    for before, now in zip(seats.active, after.active, strict=True):
        assert before == now or before in seats.leaving or before in lost
        assert now in there
    assert not after.leaving & {*after.active}


@given(MOVES, st.sampled_from(NAMES[:6]))
def test_seats_that_are_given_back_are_what_they_were(
    moves: list[tuple[str, str]], node: str
) -> None:
    seats = seated(moves).take_back(node)
    assert seats.evacuate(node).take_back(node) == seats
    assert node not in seats.evacuate(node).free(NAMES)
    assert (node in seats.free(NAMES)) == (node not in {*seats.active, *seats.aside})


@given(MOVES)
def test_seats_never_offer_who_trains_or_must_not(moves: list[tuple[str, str]]) -> None:
    seats = seated(moves)
    assert not {*seats.free(NAMES)} & {*seats.active, *seats.leaving, *seats.aside}
    assert not {*seats.usable(NAMES)} & (seats.evacuated | seats.aside)
    assert not seats.holders(NAMES) & seats.aside
