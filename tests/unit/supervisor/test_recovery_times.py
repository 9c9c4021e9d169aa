"""Times of recoveries, holds and queues from a job's events, and what stands in for them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.core.identity import SHRINK
from megatron_ft.supervisor.event_log import event_of
from megatron_ft.supervisor.recovery_cost import (
    DRAIN,
    GROW,
    HOST,
    IN_PLACE,
    QUEUE,
    SPARE,
    START,
    WAYS,
    Alternative,
)
from megatron_ft.supervisor.recovery_policy import Estimate, MeasuredTimes, describe

Happened = tuple[float, str] | tuple[float, str, dict[str, Any]]
STARTED: list[Happened] = [(0, "supervising"), (30, "training")]


def times(*happened: Happened, unasked: bool = True) -> MeasuredTimes:
    lines: list[dict[str, Any]] = [
        {"time": at, "at": at, "job": "j", "kind": kind, "text": "", **(more[0] if more else {})}
        for at, kind, *more in happened
    ]
    events = [event_of(line) for line in lines]
    return MeasuredTimes(events, unasked)


def test_restarts_are_told_apart() -> None:
    found = times(
        *STARTED,
        (100, "incarnation_ended", {"ago": 1.0}), (104, "training"),
        (200, "incarnation_ended"), (201, "node_lost"), (202, "spare"), (207, "training"),
        (300, "incarnation_ended"), (301, "node_lost"), (302, "shrunk"),
        (302, "incarnation_ended"), (311, "training"),
        (400, "grown"), (400, "incarnation_ended"), (413, "training"),
    )  # fmt: skip
    assert dict(found.spent) == {
        START: [30], IN_PLACE: [5], SPARE: [7], SHRINK: [11], GROW: [13], HOST: [98],
    }  # fmt: skip
    assert found.estimate(SHRINK) == Estimate(11, "1 measured")


@pytest.mark.parametrize("timed_out", ["hold_timed_out", "held_in_vain"])
def test_holds_and_drains_are_no_part_of_restarts(timed_out: str) -> None:
    """The second word is that of older files."""
    found = times(
        *STARTED,
        (100, "incarnation_ended"), (101, "node_lost"), (102, "salvaging"), (109, "holding"),
        (140, "incarnation_ended"), (144, "spare"), (150, "training"),
        (200, "incarnation_ended"), (201, "node_lost"), (203, "holding"), (213, timed_out),
        (213, "incarnation_ended"), (214, "salvaging"), (217, "stopped"),
        (317, "supervising"), (337, "training"),
    )  # fmt: skip
    assert dict(found.spent) == {
        START: [30, 20], DRAIN: [7, 3], SPARE: [12], HOST: [31], QUEUE: [100],
    }  # fmt: skip
    assert found.estimate(HOST) == Estimate(41, "1 measured, 10 s in vain")
    assert found.estimate(HOST, 9.0) == Estimate(25, "given, 1 measured, 10 s in vain")
    assert found.estimate(QUEUE, 50.0) == Estimate(75, "given, 1 measured")


def test_a_wait_that_has_not_ended_counts_as_time_without_a_host() -> None:
    lost: list[Happened] = [(100, "incarnation_ended"), (100, "node_lost"), (101, "shrunk")]
    trains: list[Happened] = [(110, "training"), (701, "committed")]
    found = times(*STARTED, *lost, *trains)
    assert found.estimate(HOST) == Estimate(2400, "default, 600 s in vain")
    left = times(*STARTED, (100, "shrunk"), *trains)
    assert not left.in_vain, "a node that was to leave is not expected back"
    assert not times(*STARTED, *lost, *trains, unasked=False).in_vain, "nobody waits"


def test_what_was_not_measured_has_a_default_that_is_named() -> None:
    nothing, started = times(), times(*STARTED)
    assert nothing.estimate(SHRINK) == Estimate(60, "default") == nothing.estimate(DRAIN)
    assert nothing.estimate(HOST) == Estimate(1800, "default")
    assert nothing.estimate(HOST, 5.0) == Estimate(5, "given, 0 measured")
    assert started.estimate(SHRINK) == Estimate(30, "other starts") == started.estimate(GROW)
    assert started.estimate(DRAIN) == Estimate(60, "default")
    restarted = times(*STARTED, (100, "incarnation_ended"), (104, "training"))
    assert restarted.estimate(SHRINK) == Estimate(4, "other starts")


def test_the_decision_is_told_with_the_other_ways_and_what_was_guessed() -> None:
    ways = [
        *(Alternative(way, float("inf"), "no") for way in WAYS[:2]),
        *(Alternative(way, cost) for way, cost in zip(WAYS[2:4], (210.4, 1600), strict=True)),
        Alternative("requeue", float("inf"), "nothing starts it again"),
    ]
    estimates = {"host": Estimate(1800, "default"), "shrink": Estimate(4, "1 measured")}
    assert describe(ways, 3, estimates) == (
        "no spare is left: continuing on 3 nodes (about 210 node-seconds; holding 1,600, "
        "not requeueing: nothing starts it again); by default: host 1,800 s"
    )
    nothing = [Alternative(way, float("inf"), "no") for way in WAYS]
    assert describe(nothing, 0, {}) == (
        "no spare is left: stopping (not continuing on 0 nodes: no, not holding: no, "
        "not requeueing: no)"
    )
