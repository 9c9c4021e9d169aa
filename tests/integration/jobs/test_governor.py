"""The interval that a job finds by itself: within its budget, and soon again when costs rise."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.schedule import (
    FIRST_ITERATIONS,
    IntervalGovernor,
    Pacing,
    Schedule,
    best_seconds,
)
from megatron_ft.trainer.stats import IterationTimes
from tests.support.jobs import ROOT, Job

BUDGET = 0.01
MTBF = 10_000.0
costs = st.floats(1e-4, 0.04)
sequence = itertools.count(1)


def told(governor: IntervalGovernor, costs: list[float], iteration: float = 1.0) -> list[int]:
    """The interval after each of several snapshots."""
    found = []
    for cost in costs:
        governor.record(SnapshotId(1, next(sequence)), cost, iteration, MTBF)
        found.append(governor.iterations)
    return found


@given(costs, st.floats(0.001, 0.2), st.floats(1.0, 1e7))
def test_no_other_interval_within_the_budget_is_better(
    cost: float, budget: float, mtbf: float
) -> None:
    best = best_seconds(cost, budget, mtbf)
    assert cost / best <= budget * (1 + 1e-9)

    def lost(seconds: float) -> float:
        return cost / seconds + seconds / (2 * mtbf)

    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        if cost / (best * factor) <= budget:
            assert lost(best * factor) >= lost(best) * (1 - 1e-9)


@given(costs, st.floats(0.01, 30.0))
def test_steady_costs_stay_within_the_budget(cost: float, iteration: float) -> None:
    governor = IntervalGovernor(BUDGET)
    last = told(governor, [cost] * 12, iteration)[-1]
    assert last >= 1 and cost / (last * iteration) <= BUDGET * (1 + 1e-9)
    assert governor.overhead <= BUDGET * (1 + 1e-9)


@given(costs)
def test_one_dear_snapshot_is_answered_at_once(cost: float) -> None:
    governor = IntervalGovernor(BUDGET)
    before = told(governor, [cost] * 12)[-1]
    after = told(governor, [10 * cost])[-1]
    assert 10 * cost / after <= BUDGET * (1 + 1e-9) or after == 10 * before


def test_one_hiccup_stretches_the_interval_only_so_far() -> None:
    governor = IntervalGovernor(BUDGET)
    before = told(governor, [0.001] * 6)[-1]
    assert told(governor, [1000.0])[-1] == 10 * before
    assert told(governor, [0.001])[-1] == before


def test_cheaper_snapshots_are_taken_more_often_again() -> None:
    governor = IntervalGovernor(BUDGET)
    dear = told(governor, [0.5] * 6)[-1]
    intervals = told(governor, [0.001] * 3)
    assert intervals[:2] == [dear, dear] and intervals[2] < dear / 5


def test_the_slowest_rank_counts_and_one_without_a_figure_decides_nothing() -> None:
    governor = IntervalGovernor(BUDGET)
    governor.record(SnapshotId(1, 1), 5.0, 0.0, MTBF)
    assert governor.iterations == FIRST_ITERATIONS
    governor.record(SnapshotId(1, 1), 0.001, 1.0, MTBF)
    assert governor.iterations == 10 * FIRST_ITERATIONS


def test_a_cycle_counts_from_its_last_snapshot() -> None:
    schedule = Schedule(7, 100, fixed=False)
    cycle = SnapshotCycle(1, {"dp0": "n0"}, (), schedule)
    assert schedule.next_iteration(100) == 107
    assert schedule.next_iteration(120) == 122, "never where trainers have been"
    cycle.propose(100, "")
    assert schedule.next_iteration(107) == 114
    cycle.handle("n0", m.Missed("dp0", cycle.snapshot))
    assert schedule.next_iteration(107) == 110, "nothing was taken, so nothing must be waited for"


def test_an_incarnation_begins_with_what_an_earlier_one_has_learned() -> None:
    pacing = Pacing(BUDGET, MTBF, Observers(), lambda: 0.0)
    for incarnation in (1, 2):
        schedule = pacing.begin(0, 0)
        assert schedule.interval == (2 if incarnation == 1 else 20)
        assert schedule.next_iteration(10) > 11, "the permit must not come during the last one"
        cost = m.CaptureCost("dp0", SnapshotId(incarnation, 1), 1.0, 1.0, 1, 0.1, 0.5)
        pacing.on_event(m.NodeEvent("n0", incarnation, cost))
        pacing.failed()
    assert schedule.interval == 200


def test_a_snapshot_costs_its_stall_and_its_shadow() -> None:
    pacing = Pacing(BUDGET, MTBF, Observers(), lambda: 0.0)
    schedule = pacing.begin(0, 0)
    for number in range(1, 6):
        cost = m.CaptureCost("dp0", SnapshotId(1, number), 0.5, 9.0, 1, 1.0, 1.5)
        pacing.on_event(m.NodeEvent("n0", 1, cost))
    assert schedule.interval == best_seconds(0.5 + 1.5, BUDGET, MTBF)


def iterate(times: IterationTimes, seconds: float, busy: bool, stall: float = 0.0) -> None:
    """One iteration that starts at 0, held for ``stall`` in it."""
    times.start(0.0, 1.0, busy)
    times.end(seconds + stall, 1.0 + stall)


def test_the_shadow_is_what_iterations_take_longer_beside_a_snapshot() -> None:
    times = IterationTimes()
    for _ in range(9):
        iterate(times, 1.0, busy=False)
        iterate(times, 1.25, busy=True, stall=3.0)
        iterate(times, 1.25, busy=True)
    iterate(times, 1.0, busy=False)
    assert times.iteration_seconds == 1.0
    assert times.shadow_seconds == pytest.approx(0.5)


def test_an_evaluation_is_no_shadow() -> None:
    times = IterationTimes()
    iterate(times, 1.0, busy=False)
    for seconds in (1.0, 1.0, 500.0, 1.0, 1.0):
        iterate(times, seconds, busy=True)
        iterate(times, 1.0, busy=False)
    assert times.shadow_seconds == 0.0


def governed_job(folder: Path, words: Sequence[Any], *, interval: str, **changes: Any) -> Job:
    """A job of one rank whose snapshots cost what ``words`` say; see governed_training.py."""
    program = str(ROOT / "tests" / "programs" / "governed_training.py")
    return Job(
        folder,
        nodes=1,
        protect="none",
        command=(sys.executable, program, *map(str, words)),
        environment={"MEGATRON_FT_SNAPSHOT_INTERVAL": interval},
        **changes,
    )


def test_a_job_is_back_within_its_budget_fifty_iterations_after_costs_rose(
    tmp_path: Path, made: list[Any]
) -> None:
    """Costs rise tenfold at 150 of 400; from 200 on they are what the budget allows."""
    file, dear, cheap, iteration = tmp_path / "costs", 150, 0.001, 0.02
    words = [400, dear, cheap, iteration, file]
    job = governed_job(tmp_path, words, interval="auto", expected_mtbf_hours=1 / 3600)
    made.append(job)
    job.run()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    first, last = lines[dear + 50 - 1], lines[-1]
    spent, passed = last[2] - first[2], last[1] - first[1]
    stalls = [line[2] for line in lines]
    dearest = max(after - before for before, after in itertools.pairwise(stalls[dear:]))
    assert dearest > 3 * cheap, "costs did not rise"
    # One snapshot more than the average allows fits at either end of the window.
    assert spent <= BUDGET * passed + 1.5 * dearest, (spent, passed, dearest)
