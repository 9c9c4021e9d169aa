"""The restart budget: a pure decision, checked as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.errors import ControlPlaneError, RestartBudgetError
from megatron_ft.supervisor.budget import RestartBudget
from megatron_ft.supervisor.ends import (
    Failure,
    Hung,
    Interrupted,
    NodeLost,
    RebuildFailed,
    TrainerFailed,
    TrainerStopped,
)

TEXTS, NODES = st.text(max_size=3), st.sampled_from(("", "n0", "n1", "n2"))
FAILURES = st.one_of(
    *(st.builds(kind, TEXTS, NODES) for kind in (Hung, NodeLost, RebuildFailed)),
    *(st.builds(Interrupted, TEXTS, NODES, error=st.sampled_from((ControlPlaneError, OSError))),),
    *(
        st.builds(kind, TEXTS, NODES, status=st.integers(-9, 9))
        for kind in (TrainerFailed, TrainerStopped)
    ),
)


def own(rank: int, node: str = "") -> Failure:
    """One error of the training command, as ranks meet it."""
    return TrainerFailed(f"rank {rank} exited with 1", node, status=1)


def starts(failures: list[Failure]) -> int:
    """How often a job is started that fails so and makes no progress."""
    budget = RestartBudget()
    for count, failure in enumerate(failures, start=1):
        try:
            budget = budget.after(failure, -1)
        except RestartBudgetError:
            return count
    return len(failures) + 1


@given(st.lists(st.integers(0, 4095), min_size=30, max_size=30))
def test_one_error_is_one_failure_on_whatever_rank(ranks: list[int]) -> None:
    assert starts([own(rank, f"n{rank // 8}") for rank in ranks]) == 3


@given(st.data())
def test_no_sequence_without_progress_leads_to_more_starts_than_stated(data: st.DataObject) -> None:
    """Whatever fails, wherever, whatever spares and other states there are."""
    budget = RestartBudget()
    for count in range(1, 100):
        failure: Failure = TrainerStopped(f"world w{count}", status=count)
        if data.draw(st.booleans()):
            failure = data.draw(FAILURES)
        if data.draw(st.booleans()):
            budget = budget.from_other_start()
        try:
            budget = budget.after(failure, -1)
        except RestartBudgetError:
            assert count <= budget.total_limit
            return
    pytest.fail("a job without progress was started 100 times")


def test_the_third_same_failure_without_progress_stops_the_job_and_is_named() -> None:
    budget = RestartBudget().after(own(3), 40).after(own(1), 40)
    with pytest.raises(
        RestartBudgetError, match="rank 7 exited with 1 .the first: rank 3"
    ) as caught:
        budget.after(own(7), 40)
    assert "iteration 40" in str(caught.value)


def test_a_failure_before_any_commit_says_so() -> None:
    with pytest.raises(RestartBudgetError, match="nothing committed"):
        RestartBudget(same_failure_limit=1).after(own(0), -1)


def test_a_failure_that_no_start_can_cure_stops_the_job_at_once() -> None:
    with pytest.raises(RestartBudgetError, match="no such file; another start"):
        RestartBudget().after(TrainerFailed("no such file", final=True, status=2), 5)


def test_what_comes_from_outside_is_counted_on_each_node_and_in_all() -> None:
    def killed(node: str) -> Failure:
        return TrainerStopped(f"a rank of {node} was killed", node, status=-9)

    assert starts([killed("n1")] * 9) == 3
    assert starts([killed(f"n{i}") for i in range(30)]) == 20


def test_delay_doubles_without_progress_and_vanishes_with_it() -> None:
    budget = RestartBudget(same_failure_limit=100)
    delays = []
    for _ in range(9):
        budget = budget.after(own(0), -1)
        delays.append(budget.delay_seconds)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert budget.after(own(0), 0).delay_seconds == 0


@given(st.integers(2, 200), st.lists(FAILURES, max_size=20))
def test_steady_progress_never_stops_nor_delays(limit: int, failures: list[Failure]) -> None:
    budget = RestartBudget(same_failure_limit=limit)
    for iteration, failure in enumerate(failures):
        budget = budget.after(failure, iteration)
        assert budget.delay_seconds == 0


@given(st.integers(1, 2000))
def test_delay_never_shrinks_without_progress_and_stays_bounded(restarts: int) -> None:
    one = RestartBudget(restarts_without_progress=restarts)
    more = RestartBudget(restarts_without_progress=restarts + 1)
    assert 0 < one.delay_seconds <= more.delay_seconds <= one.longest_delay_seconds


@given(st.lists(st.tuples(FAILURES, st.integers(-1, 6)), max_size=30))
def test_a_rollback_is_no_progress(events: list[tuple[Failure, int]]) -> None:
    budget = RestartBudget(1000, 1000, highest_iteration=6)
    for count, (failure, committed) in enumerate(events, start=1):
        budget = budget.after(failure, committed)
        assert budget.restarts_without_progress == count


def test_failures_from_another_state_count_anew() -> None:
    budget = RestartBudget().after(own(0), -1).after(own(1), -1).from_other_start()
    budget = budget.after(own(0), -1).after(own(1), -1)
    with pytest.raises(RestartBudgetError):
        budget.after(own(0), -1)


def test_what_the_framework_saves_is_progress_and_what_lay_there_before_is_none() -> None:
    budget = RestartBudget(highest_saved=500)
    for iteration in range(5):
        budget = budget.after(own(0), iteration, saved=500)
        assert budget.delay_seconds == 0
    for saved in range(501, 510):
        budget = budget.after(own(0), 4, saved=saved)
        assert budget.delay_seconds == 0
    assert budget.after(own(0), 4, saved=509).delay_seconds == 1
