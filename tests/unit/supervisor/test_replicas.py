"""Who is odd among replicas, what differs by design, and what is given up: pure decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.ends import ReplicasDiffer
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.replicas import ReplicaComparison, ReplicaWatch, odd_shards
from tests.protocol.model.memory import record_of
from tests.support.cycle_driver import PLACES, Driver, to_all

SHARDS = tuple(PLACES)
NAMES = ("embedding", "layer.0", "layer.1")


def reports(
    *values: str, shards: Iterable[str] = SHARDS, group: str = "g"
) -> dict[str, tuple[m.ReplicaDigests, ...]]:
    """Of each shard the digests that a word spells, a letter for a tensor."""
    made = {}
    for number, (shard, word) in enumerate(zip(shards, values, strict=True)):
        digests = "".join(letter * 8 for letter in word).encode()
        made[shard] = (m.ReplicaDigests(group, digests, () if number else NAMES[: len(word)]),)
    return made


@given(st.dictionaries(st.text(max_size=3), st.sampled_from([b"a", b"b", b"c"]), min_size=1))
def test_the_odd_ones_are_those_without_the_majority(digests: dict[str, bytes]) -> None:
    odd = odd_shards(digests)
    rest = {digests[shard] for shard in digests.keys() - odd}
    assert odd <= digests.keys() and len(rest) <= 1
    if len(set(digests.values())) == 1:
        assert not odd
    elif odd != digests.keys():
        assert len(odd) < len(digests) / 2 and not rest & {digests[shard] for shard in odd}
    else:
        assert all(2 * list(digests.values()).count(d) <= len(digests) for d in digests.values())


@given(st.integers(3, 9), st.data())
def test_one_flip_among_three_or_more_is_blamed_on_its_rank(ranks: int, data: Any) -> None:
    flipped = data.draw(st.integers(0, ranks - 1))
    digests = {f"dp{i}": b"b" if i == flipped else b"a" for i in range(ranks)}
    assert odd_shards(digests) == {f"dp{flipped}"}


def test_of_two_both_are_named() -> None:
    assert odd_shards({"dp0": b"a", "dp1": b"b"}) == {"dp0", "dp1"}


def test_what_differs_at_first_is_so_by_design_and_reported_once() -> None:
    comparison = ReplicaComparison()
    first = comparison.compare(reports("axc", "ayc", "azc"), PLACES)
    assert (first.odd, first.unlike) == (set(), {("g", 1)})
    assert comparison.describe(first.unlike) == "layer.0"
    later = comparison.compare(reports("axc", "ayc", "bqc"), PLACES)
    assert (later.odd, later.unlike) == ({("g", 0)}, set())
    assert later.shards == {"dp2"}


def test_what_differs_again_and_again_is_so_by_design() -> None:
    comparison = ReplicaComparison()
    comparison.compare(reports("a", "a", "a"), PLACES)
    for _ in range(2):
        assert comparison.compare(reports("b", "c", "a"), PLACES).shards == set(SHARDS)
    third = comparison.compare(reports("b", "c", "a"), PLACES)
    assert (third.odd, third.unlike) == (set(), {("g", 0)})


def test_so_is_what_follows_a_rank_from_node_to_node() -> None:
    comparison = ReplicaComparison()
    comparison.compare(reports("a", "a", "a"), PLACES)
    for node in ("n2", "n3"):
        moved = PLACES | {"dp2": node}
        assert comparison.compare(reports("a", "a", "b"), moved).shards == {"dp2"}
    assert comparison.compare(reports("a", "a", "b"), PLACES | {"dp2": "n4"}).unlike


def test_a_node_that_is_odd_alone_each_time_stays_at_fault() -> None:
    comparison = ReplicaComparison()
    comparison.compare(reports("a", "a", "a"), PLACES)
    for _ in range(5):
        assert comparison.compare(reports("a", "a", "b"), PLACES).shards == {"dp2"}


def test_alarms_with_agreement_between_them_stay_alarms() -> None:
    comparison = ReplicaComparison()
    comparison.compare(reports("a", "a", "a"), PLACES)
    for _ in range(10):
        assert comparison.compare(reports("a", "b", "a"), PLACES).shards == {"dp1"}
        assert not comparison.compare(reports("a", "a", "a"), PLACES).odd


def test_groups_are_compared_apart_and_nobody_with_nobody() -> None:
    comparison = ReplicaComparison()
    both = reports("a", "b", shards=("dp0", "dp1"), group="g") | reports(
        "q", shards=("dp2",), group="other"
    )
    assert comparison.compare(both, PLACES).unlike == {("g", 0)}
    equal = reports("a", "a", shards=("dp0", "dp1"), group="x")
    alone = reports("z", shards=("dp2",), group="x-alone")
    for _ in range(3):
        verdict = comparison.compare(equal | alone, PLACES)
        assert not verdict.odd and not verdict.unlike


def test_a_shorter_report_differs() -> None:
    comparison = ReplicaComparison()
    comparison.compare(reports("ab", "ab", "ab"), PLACES)
    assert comparison.compare(reports("ab", "ab", "a"), PLACES).shards == {"dp2"}


class Watched:
    """A watch and its events."""

    def __init__(self) -> None:
        observers = Observers()
        self.events: list[Any] = []
        observers.subscribe(self.events.append)
        self.watch = ReplicaWatch(observers)

    def judge(self, sequence: int, *values: str) -> str:
        found = reports(*values)
        return self.watch.judge(PLACES, SnapshotId(7, sequence), 10 * sequence, found)

    def failure(self) -> ReplicasDiffer:
        return asyncio.run(self.watch.until_differ())

    def undo(self, *sequences: int) -> int:
        return self.watch.undo([(SnapshotId(7, s), 10 * s) for s in sequences])


def test_a_difference_ends_the_incarnation_and_names_the_node() -> None:
    watched = Watched()
    assert watched.judge(1, "a", "a", "a") == ""
    reason = watched.judge(2, "a", "a", "b")
    assert reason == "replicas of embedding differ at iteration 20: dp2 on n2"
    (event,) = watched.events
    assert (event.kind, event.text) == ("replicas_differ", reason)
    assert event.fields["shards"] == ["dp2"] and event.fields["nodes"] == ["n2"]
    assert watched.watch.differ.is_set()
    failure = watched.failure()
    assert watched.undo(1) == 11 and not watched.watch.differ.is_set()
    assert (failure.node, failure.training) == ("n2", False)


def test_a_snapshot_behind_the_verdict_of_its_incarnation_gets_none() -> None:
    watched = Watched()
    assert watched.judge(1, "a", "a", "a") == "" and watched.judge(2, "a", "a", "b")
    watched.undo(1)
    assert "about to end" in watched.judge(3, "a", "a", "b")
    assert not watched.watch.differ.is_set() and len(watched.events) == 1
    later = watched.watch.judge(PLACES, SnapshotId(8, 1), 20, reports("a", "a", "b"))
    assert "differ at iteration 20" in later and watched.watch.differ.is_set()


def test_where_nobody_is_the_odd_one_no_node_is_blamed() -> None:
    watched = Watched()
    watched.judge(1, "a", "a", "a")
    watched.judge(2, "a", "b", "c")
    assert watched.failure().node == ""


@pytest.mark.parametrize(
    ("held", "before"),
    [
        ((1, 2), 21),  # both were compared
        ((2, 3), 21),  # 3 was not
        ((3,), 31),  # nothing else is left
        ((), 40),  # nothing is left: only what is known to differ is given up
    ],
)
def test_the_newest_snapshot_that_was_compared_is_resumed_from(
    held: tuple[int, ...], before: int
) -> None:
    watched = Watched()
    for sequence in (1, 2):
        watched.judge(sequence, "a", "a", "a")
    assert watched.judge(4, "a", "b", "a")
    assert watched.undo(*held) == before


def test_snapshots_without_digests_are_not_counted_as_compared() -> None:
    watched = Watched()
    assert watched.watch.judge(PLACES, SnapshotId(7, 1), 10, dict.fromkeys(SHARDS, ())) == ""
    watched.judge(2, "a", "a", "a")
    watched.judge(3, "a", "b", "a")
    assert watched.undo(1, 2) == 21


def test_an_error_of_the_comparison_costs_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    monkeypatch.setattr(ReplicaComparison, "compare", lambda *_: 1 / 0)
    assert watched.judge(1, "a", "b", "a") == ""
    assert not watched.watch.differ.is_set()


def test_a_snapshot_in_which_replicas_differ_is_never_encoded() -> None:
    watched = Watched()
    watched.judge(1, "a", "a", "a")
    d = Driver(judge=partial(watched.watch.judge, PLACES))
    d.propose()
    found = reports("a", "a", "b")
    actions = [
        action
        for shard in SHARDS
        for action in d.cycle.handle(
            PLACES[shard], m.Sealed(record_of(d.cycle.snapshot, shard, 12), found[shard])
        )
    ]
    assert to_all(actions, m.Abort)
    (ended,) = d.confirm(actions)
    assert "dp2 on n2" in getattr(ended, "reason", "")
