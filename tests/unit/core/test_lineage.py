"""The lineage against a model of it: the tree of incarnations, walked from the newest to the
root."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.identity import Ancestor, SnapshotId, extend, on_lineage


def test_own_snapshots_are_all_on_the_lineage() -> None:
    assert on_lineage(SnapshotId(3, 99), extend((), 3, None))


def test_what_was_rolled_back_is_not() -> None:
    lineage = extend(extend((), 1, None), 2, SnapshotId(1, 5))
    assert on_lineage(SnapshotId(1, 5), lineage) and on_lineage(SnapshotId(1, 4), lineage)
    assert not on_lineage(SnapshotId(1, 6), lineage)


def test_an_incarnation_that_was_rolled_back_entirely_is_not() -> None:
    lineage = extend(extend(extend((), 1, None), 2, SnapshotId(1, 5)), 3, SnapshotId(1, 4))
    assert not on_lineage(SnapshotId(2, 1), lineage)
    assert not on_lineage(SnapshotId(1, 5), lineage)
    assert on_lineage(SnapshotId(1, 4), lineage)


def test_a_start_from_nothing_has_no_past() -> None:
    lineage = extend(extend((), 1, None), 2, None)
    assert lineage == (Ancestor(2, None),)
    assert not on_lineage(SnapshotId(1, 1), lineage)


def test_nothing_is_older_than_a_start_from_nothing() -> None:
    """Whoever wrote that lineage: extend would have cut it there."""
    assert not on_lineage(SnapshotId(1, 1), (Ancestor(1, None), Ancestor(2, None)))


def test_a_later_incarnation_is_not_on_the_lineage_of_an_earlier_one() -> None:
    assert not on_lineage(SnapshotId(2, 1), extend((), 1, None))


def test_nothing_is_on_an_empty_lineage() -> None:
    assert not on_lineage(SnapshotId(1, 1), ())


def test_what_is_older_than_all_that_is_kept_is_off_the_lineage() -> None:
    lineage = extend((), 1, None)
    for incarnation in range(2, 10):
        lineage = extend(lineage, incarnation, SnapshotId(incarnation - 1, 1), keep=3)
    assert [a.incarnation for a in lineage] == [7, 8, 9]
    assert on_lineage(SnapshotId(7, 1), lineage) and not on_lineage(SnapshotId(6, 1), lineage)


@st.composite
def histories(draw: st.DrawFn) -> list[Ancestor]:
    """One incarnation after the other; each starts from nothing or from a snapshot on the
    lineage."""
    incarnations = [Ancestor(1, None)]
    for incarnation in range(2, draw(st.integers(2, 9))):
        past = sorted(_past(incarnations))
        incarnations.append(Ancestor(incarnation, draw(st.sampled_from([None, *past]))))
    return incarnations


def _past(incarnations: list[Ancestor]) -> set[SnapshotId]:
    """All that the newest incarnation descends from; each incarnation took three snapshots."""
    parents = {a.incarnation: a.parent for a in incarnations}
    found: set[SnapshotId] = set()
    incarnation, limit = incarnations[-1].incarnation, 3
    while True:
        found |= {SnapshotId(incarnation, sequence) for sequence in range(1, limit + 1)}
        parent = parents[incarnation]
        if parent is None:
            return found
        incarnation, limit = parent


@given(histories())
@settings(max_examples=300, derandomize=True, deadline=None)
def test_on_lineage_is_descent(incarnations: list[Ancestor]) -> None:
    lineage: tuple[Ancestor, ...] = ()
    for ancestor in incarnations:
        lineage = extend(lineage, *ancestor)
    everything = {SnapshotId(a.incarnation, s) for a in incarnations for s in (1, 2, 3)}
    assert {s for s in everything if on_lineage(s, lineage)} == _past(incarnations)
    assert lineage[-1] == incarnations[-1]
