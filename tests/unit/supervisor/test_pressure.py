"""Snapshots that make iterations late wait, as long as the budget asks for, and no longer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import CommittedEvent, JobEvent, Observers
from megatron_ft.supervisor.pressure import CREDIT, MOST_WAIT, PRICE, REST, Debt
from megatron_ft.supervisor.schedule import Pacing, Schedule
from megatron_ft.trainer.stats import LateIterations

BUDGET = 10.0
SNAPSHOT = 3
"""Iterations beside one snapshot."""
MANY = settings(max_examples=20, derandomize=True, deadline=None)
PERIODS = st.lists(st.tuples(st.integers(1, 1200), st.booleans()), min_size=1, max_size=5)


class Story:
    """A training under a hog: which iterations were late by a snapshot, and which were captured."""

    def __init__(
        self,
        iterations: int,
        usual: Callable[[int], float],
        beside: Callable[[int], float],
        interval: int = 2,
    ) -> None:
        self.late: list[int] = []
        self.taken: list[int] = []
        trainer, schedule, left = LateIterations(BUDGET), Schedule(interval), 0
        for iteration in range(1, iterations + 1):
            busy = left > 0
            seconds = beside(iteration) if busy else usual(iteration)
            if busy and seconds > usual(iteration) * (1 + BUDGET / 100):
                self.late.append(iteration)
            if (late := trainer.ended(seconds, busy)) is not None:
                schedule.debt.charge(iteration, late)
            left = max(0, left - 1)
            if not left and not schedule.waits(iteration) and iteration % interval == 0:
                self.taken.append(iteration)
                left = SNAPSHOT

    def longest_gap(self, first: int) -> int:
        pairs = itertools.pairwise(one for one in self.taken if one >= first)
        return max(after - before for before, after in pairs)


@given(PERIODS)
@MANY
def test_late_iterations_stay_below_one_percent_whenever_snapshots_slow_training(
    periods: list[tuple[int, bool]],
) -> None:
    slow = [hog for length, hog in periods for _ in range(length)]
    story = Story(len(slow), lambda _: 1.0, lambda i: 1.5 if slow[i - 1] else 1.0)
    for (first, one), (last, other) in itertools.combinations(enumerate(story.late), 2):
        assert last - first + 1 <= (other - one + 1) / 100 + CREDIT + 2 * SNAPSHOT


@given(st.integers(50, 2500), st.integers(1, 40))
@MANY
def test_full_protection_returns_in_time_after_the_hog(hog: int, interval: int) -> None:
    """A job that is never without a snapshot rests once in QUIET_AGE iterations."""
    first = hog + REST + MOST_WAIT
    assert REST + MOST_WAIT == 2040
    story = Story(first + 900, lambda _: 1.0, lambda i: 1.5 if i <= hog else 1.0, interval)
    back = [one for one in story.taken if one >= first]
    assert len(back) > (900 - REST) / (interval + SNAPSHOT) - 2
    assert story.longest_gap(first) <= REST + SNAPSHOT + interval


def test_a_hog_that_slows_all_iterations_alike_costs_rests_and_no_more() -> None:
    """At 500 all iterations take twice as long, with a snapshot or without; at 1000 no more."""

    def usual(iteration: int) -> float:
        return 2.0 if 500 <= iteration < 1000 else 1.0

    story = Story(1500, usual, usual)
    assert REST <= story.longest_gap(400) <= REST + 4
    assert len(story.taken) > 1500 / (SNAPSHOT + 1) - 4 * REST


def test_what_iterations_took_long_ago_excuses_nothing() -> None:
    """Until 300 they took twice as long; then none is without a snapshot, and each is late."""

    def usual(iteration: int) -> float:
        return 2.0 if iteration < 300 else 1.0

    story = Story(4000, usual, lambda i: max(1.5, usual(i)), interval=1)
    assert sum(one > 2500 for one in story.late) <= 1500 / PRICE + CREDIT + SNAPSHOT


def test_one_late_iteration_is_forgiven_and_a_pause_is_none() -> None:
    story = Story(2000, lambda _: 1.0, lambda i: 9.0 if i == 600 else 1.0)
    assert story.longest_gap(0) <= REST + 4
    trainer = LateIterations(BUDGET)
    assert [trainer.ended(None, True) for _ in range(3)] == [None] * 3
    assert LateIterations(0.0).ended(9.0, True) is None, "there is no budget"


def test_ranks_that_speak_of_the_same_iterations_are_charged_once() -> None:
    one, several = Debt(), Debt()
    one.charge(500, 5)
    for iteration, late in ((500, 2), (500, 5), (501, 4)):
        several.charge(iteration, late)
    assert one.until == several.until == 500 + (5 - CREDIT) * PRICE


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2000)), max_size=40))
@MANY
def test_nothing_waits_longer_than_the_longest_wait(words: list[tuple[int, int]]) -> None:
    debt, iteration = Debt(), 0
    for steps, late in words:
        iteration += steps
        debt.charge(iteration, late)
        assert debt.until <= iteration + MOST_WAIT


def test_each_step_is_an_event_and_what_is_urgent_does_not_wait() -> None:
    events: list[JobEvent] = []
    observers = Observers()
    observers.subscribe(events.append)
    pacing = Pacing(0.01, 3600.0, observers)
    schedule = pacing.begin(2, 0)
    for late in (0, CREDIT + 1, CREDIT + 1):
        pacing.on_event(m.NodeEvent("n0", 1, m.Slowed("dp0", 100, late)))
    until = 100 + PRICE
    told = [(event.kind, event.fields["until"], event.fields["late"]) for event in events]
    assert told == [("pressure", 100 + REST, 0), ("pressure", until, CREDIT + 1)]
    assert schedule.waits(until - 1) and not schedule.waits(until - 1, urgent=True)
    assert not schedule.waits(until)
    for iteration in (100, until, until + 2):
        observers.emit(CommittedEvent(iteration=iteration), "")
    assert [event.kind for event in events].count("pressure_over") == 1
    assert events[-2].kind == "pressure_over", "at the first commit that was not held back"


def test_training_that_goes_back_owes_nothing() -> None:
    schedule = Schedule(2)
    schedule.reached(900)
    schedule.debt.charge(900, 5)
    assert schedule.waits(901)
    schedule.reached(100)
    assert not schedule.waits(100)
