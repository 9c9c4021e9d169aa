"""The restart budget: a pure decision, checked as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import RestartBudgetError
from megatron_ft.launch.budget import RestartBudget

FAILURES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 6)), max_size=30)


def test_the_third_same_failure_without_progress_stops_the_job_and_is_named() -> None:
    budget = RestartBudget().after("rank 3: OOM", 40).after("rank 3: OOM", 40)
    with pytest.raises(RestartBudgetError, match="rank 3: OOM") as caught:
        budget.after("rank 3: OOM", 40)
    assert "iteration 40" in str(caught.value)


def test_a_failure_before_any_commit_says_so() -> None:
    with pytest.raises(RestartBudgetError, match="nothing committed"):
        RestartBudget(same_failure_limit=1).after("boom", -1)


def test_delay_doubles_without_progress_and_vanishes_with_it() -> None:
    budget = RestartBudget(same_failure_limit=100)
    delays = []
    for _ in range(9):
        budget = budget.after("x", -1)
        delays.append(budget.delay_seconds)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert budget.after("x", 0).delay_seconds == 0


@given(FAILURES)
def test_stops_exactly_when_one_failure_fills_its_limit_at_one_height(
    events: list[tuple[str, int]],
) -> None:
    budget, height = RestartBudget(), -1
    since: list[str] = []
    for failure, committed in events:
        since = [failure] if committed > height else [*since, failure]
        height = max(height, committed)
        if since.count(failure) >= budget.same_failure_limit:
            with pytest.raises(RestartBudgetError):
                budget.after(failure, committed)
            return
        budget = budget.after(failure, committed)
        assert budget.highest_iteration == height


@given(st.integers(1, 200), st.lists(st.sampled_from("abc"), max_size=20))
def test_steady_progress_never_stops_nor_delays(limit: int, failures: list[str]) -> None:
    budget = RestartBudget(same_failure_limit=limit + 1)
    for iteration, failure in enumerate(failures):
        budget = budget.after(failure, iteration)
        assert budget.delay_seconds == 0


@given(st.integers(1, 2000))
def test_delay_never_shrinks_without_progress_and_stays_bounded(restarts: int) -> None:
    one = RestartBudget(restarts_without_progress=restarts)
    more = RestartBudget(restarts_without_progress=restarts + 1)
    assert 0 < one.delay_seconds <= more.delay_seconds <= one.longest_delay_seconds


@given(FAILURES)
def test_a_rollback_is_no_progress(events: list[tuple[str, int]]) -> None:
    budget = RestartBudget(same_failure_limit=1000, highest_iteration=6)
    for count, (failure, committed) in enumerate(events, start=1):
        budget = budget.after(failure, committed)
        assert budget.restarts_without_progress == count
