"""The time of recoveries in parts, as the supervisor hears of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_ft.cli.run_folders import RunSummary
from megatron_ft.core.identity import SHRINK
from megatron_ft.rpc.heartbeat_page import PulseReport
from megatron_ft.supervisor import heartbeats
from megatron_ft.supervisor.event_log import event_of
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.heartbeats import Heartbeats, RankReport, RecoveryClock, in_ranges
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


def report(rank: int, **known: Any) -> PulseReport:
    zero = dict.fromkeys(PulseReport.__struct_fields__, 0)
    return PulseReport(**{**zero, "rank": rank, "state": "S", **known})


def heard(rank: int, at: float, **known: Any) -> RankReport:
    return RankReport(f"pp0-tp0-dp{rank}-ep0", f"n{rank}", at, report(rank, **known))


def recovering() -> RecoveryClock:
    """A job whose second incarnation has just been started."""
    clock = RecoveryClock()
    clock.starting(0.0)
    clock.failed()
    clock.dead("rank 1 was killed")
    clock.starting(time.monotonic())
    clock.registered({"warm": [1], "cold": [0]})
    return clock


def test_a_recovery_is_told_once_when_all_have_ended_an_iteration() -> None:
    clock = recovering()
    ranks = [heard(0, time.monotonic(), done=1), heard(1, time.monotonic(), done=0)]
    assert clock.poll([]) is None and clock.poll(ranks) is None
    ranks[1] = heard(1, time.monotonic(), done=1)
    found = clock.poll(ranks)
    assert found is not None and found.total < 10.0
    assert clock.poll(ranks) is None
    assert found.cause == "rank 1 was killed"
    assert found.describe().endswith("; restart of ranks: 1 warm; 0 cold")
    assert found.starts == {"warm": [1], "cold": [0]}


def test_the_first_iteration_counts_not_when_it_is_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has the clock of its node, and heartbeats come when later iterations are done."""
    now = [100.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])
    clock = recovering()
    now[0] += 3.0
    ranks = [
        heard(0, 102.9, done=5, first=7000.5, marked=7001.0, idle=0.4),
        heard(1, 102.9, done=5, first=20.1, marked=21.0, idle=0.4),
    ]
    found = clock.poll(ranks)
    assert found is not None and found.total == pytest.approx(2.0), "rank 0 was last"
    assert found.parts()["iterate"] == pytest.approx(2.0)


def test_ranks_are_told_in_ranges() -> None:
    assert in_ranges([]) == "" and in_ranges([3]) == "3"
    assert in_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_the_first_incarnation_is_no_recovery() -> None:
    clock = RecoveryClock()
    clock.starting(0.0)
    assert clock.poll([heard(0, time.monotonic(), done=1)]) is None


def test_what_was_detected_late_counts() -> None:
    clock = RecoveryClock()
    clock.starting(0.0)
    clock.detected(7.0)
    clock.failed()
    clock.dead("hang")
    clock.starting(time.monotonic())
    clock.registered({})
    found = clock.poll([heard(0, time.monotonic(), done=1)])
    assert found is not None and found.detect == 7.0
    assert found.total == pytest.approx(7.0, abs=0.5)


def test_an_incarnation_without_trainers_belongs_to_the_same_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node was lost and no spare is left: the next incarnation begins only when all is
    exported."""
    now = [100.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])
    clock = RecoveryClock()
    clock.starting(0.0)
    for cause in ("node n1 is lost", "fewer nodes train"):
        clock.failed()
        clock.dead(cause)
        now[0] += 10.0
    clock.starting(now[0] - 2.0)
    clock.registered({})
    now[0] += 1.0
    found = clock.poll([heard(0, now[0], done=1)])
    assert found is not None and found.cause == "node n1 is lost"
    assert (found.kill, found.decide, found.rebuild, found.total) == (0.0, 18.0, 2.0, 21.0)


def test_the_last_lines_say_where_files_are() -> None:
    summary = RunSummary()
    assert summary.lines() == []
    summary(JobEvent("exported", "iteration 6 is exported to /data", {"folder": "/data"}))
    assert summary.lines() == ["exported: iteration 6 is exported to /data"]


def test_old_reports_say_nothing() -> None:
    board = Heartbeats()
    board.record("n0", {"pp0-tp0-dp0-ep0": report(0)})
    assert board.fresh(2, 60.0) == []
    board.record("n1", {"pp0-tp0-dp1-ep0": report(1)})
    assert [one.report.rank for one in board.fresh(2, 60.0)] == [0, 1]
    assert board.fresh(2, 0.0) == []
    board.begin_incarnation()
    assert board.fresh(2, 60.0) == []


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
