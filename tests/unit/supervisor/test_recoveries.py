"""The time of recoveries in parts, as the supervisor hears of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_ft.cli.run_folders import RunSummary
from megatron_ft.rpc.heartbeat_page import PulseReport
from megatron_ft.supervisor import heartbeats
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.heartbeats import (
    Heartbeats,
    RankReport,
    RecoveryClock,
    in_ranges,
)


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
