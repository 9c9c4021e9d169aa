"""When the next snapshot is due, after whatever has become of those before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.supervisor.schedule import Numbering, Schedule, Skips

INTERVALS = st.integers(1, 50)
ITERATIONS = st.integers(0, 10_000)
END = st.sampled_from(["missed", "committed", "aborted"])
ENDS = st.lists(st.tuples(END, st.integers(1, 80)), max_size=6).map(
    lambda runs: [end for end, times in runs for _ in range(times)]
)
"""Long runs of each: the lead changes after many commits, and has an end after many misses."""
MANY = settings(max_examples=300, derandomize=True, deadline=None)


def take(schedule: Schedule, progress: int, end: str) -> int:
    """Permit a snapshot that ends so; its iteration."""
    iteration = schedule.next_iteration(progress)
    schedule.permitted(iteration)
    if end == "missed":
        schedule.missed()
    elif end == "committed":
        schedule.committed()
    return iteration


@given(INTERVALS, ITERATIONS, ENDS)
@MANY
def test_a_fixed_one_is_the_first_multiple_beyond_the_lead(
    interval: int, progress: int, ends: list[str]
) -> None:
    schedule = Schedule(interval)
    for end in ends:
        lead = schedule.lead
        iteration = take(schedule, progress, end)
        assert iteration % interval == 0
        assert progress + lead < iteration <= progress + lead + interval
        progress = iteration


@given(INTERVALS, ITERATIONS, st.lists(st.tuples(st.integers(0, 90), st.booleans()), max_size=30))
@MANY
def test_another_one_is_an_interval_after_the_last_that_was_taken(
    interval: int, first: int, story: list[tuple[int, bool]]
) -> None:
    schedule, taken, progress = Schedule(interval, first, fixed=False), first, first
    for steps, missed in story:
        progress += steps
        earliest = max(progress + schedule.lead + 1, taken + interval)
        assert take(schedule, progress, "missed" if missed else "aborted") == earliest
        taken = taken if missed else earliest


@given(INTERVALS, ITERATIONS, st.booleans())
@MANY
def test_before_any_progress_it_counts_from_where_training_starts(
    interval: int, first: int, fixed: bool
) -> None:
    schedule = Schedule(interval, first, fixed=fixed)
    assert schedule.next_iteration(-1) == schedule.next_iteration(first)


@given(INTERVALS, ITERATIONS, ITERATIONS, ENDS, st.booleans())
@MANY
def test_where_training_goes_back_it_counts_from_there(
    interval: int, high: int, low: int, ends: list[str], fixed: bool
) -> None:
    schedule = Schedule(interval, fixed=fixed)
    for progress, end in enumerate(ends, high):
        schedule.reached(progress)
        take(schedule, progress, end)
    schedule.reached(progress := min(low, high))
    if ends and low < high:
        due = schedule.next_iteration(progress)
        assert progress + schedule.lead < due <= progress + schedule.lead + interval


@given(INTERVALS, ENDS)
@MANY
def test_the_lead_grows_with_each_miss_and_shrinks_with_calm(
    interval: int, ends: list[str]
) -> None:
    schedule, least, calm = Schedule(interval), int(interval > 1), 0
    expected = least
    for end in ends:
        take(schedule, 0, end)
        if end == "missed":
            expected, calm = min(expected + 1, Schedule.MOST_LEAD), 0
        elif end == "committed":
            calm += 1
            expected = max(expected - (calm % Schedule.CALM == 0), least)
        assert schedule.lead == expected


def test_an_interval_that_changes_counts_from_now_on() -> None:
    schedule = Schedule(5, fixed=False)
    assert take(schedule, 3, "committed") == 5
    schedule.interval = 50
    assert schedule.next_iteration(6) == 55


def test_commits_are_counted_from_the_first_one() -> None:
    schedule = Schedule(2)
    schedule.interval = 1
    leads = []
    for _ in range(Schedule.CALM):
        schedule.committed()
        leads.append(schedule.lead)
    assert leads == [1] * (Schedule.CALM - 1) + [0]


def hit(schedule: Schedule, numbers: list[int], seen_every: int) -> list[int]:
    """Numbers of ``numbers`` that a permit was for, as the coordinator and the ranks meet them.

    The coordinator hears of every so many iterations, and permits when nothing is under way.
    """
    permitted, hits, heard = schedule.next_iteration(-1), [], -1
    schedule.permitted(permitted)
    for done, number in enumerate(numbers, 1):
        if done % seen_every == 0:
            schedule.heard(done, number)
            heard = number
        if number < permitted:
            continue
        if number == permitted:
            hits.append(number)
            schedule.committed()
        else:
            schedule.missed()
        schedule.reached(number)
        permitted = schedule.next_iteration(max(heard, number))
        schedule.permitted(permitted)
    return hits


@given(
    st.integers(1, 10_000),
    st.integers(0, 5000),
    st.integers(1, 5),
    st.integers(1, 30),
    st.booleans(),
)
@settings(MANY, max_examples=60)
def test_numbers_that_rise_by_any_step_are_met(
    step: int, begin: int, seen_every: int, interval: int, fixed: bool
) -> None:
    """Tokens for iterations, or a save every hundred of them."""
    schedule = Schedule(interval, fixed=fixed)
    numbers = [begin + step * number for number in range(1, 201)]
    hits = hit(schedule, numbers, seen_every)
    assert hits and numbers.index(hits[0]) < 2 * interval + 20
    # Once it is known, each permit is met, at its interval.
    assert schedule.numbering.stride == step and not schedule.numbering.irregular
    assert len(hits) >= (180 - 2 * interval) // (interval + 5)


def test_numbers_that_cannot_be_foreseen_are_named_once_and_met_by_chance() -> None:
    numbering = Numbering()
    numbers = [0, 3, 7, 8, 20, 21, 30, 34]
    said = [numbering.heard(done, number) for done, number in enumerate(numbers)]
    texts = [text for text in said if text]
    assert "rise by 3" in texts[0] and len(texts) == 2
    assert "different amounts" in texts[1] and "let them rise by one" in texts[1]
    assert (numbering.stride, numbering.irregular) == (1, True)


def test_training_that_goes_back_is_no_other_numbering() -> None:
    numbering = Numbering()
    pairs = [(1, 100), (2, 200), (5, 500), (6, 300), (7, 400), (9, 600)]
    assert [bool(numbering.heard(*pair)) for pair in pairs] == [False, True] + 4 * [False]
    assert numbering.stride == 100


def test_a_job_that_starts_again_knows_the_numbering() -> None:
    schedule = Schedule(2, 4096, stride=4096)
    assert schedule.next_iteration(-1) == 3 * 4096 and schedule.spacing == 4096
    assert schedule.next_iteration(8192, ahead=1) == 5 * 4096


def test_one_period_is_told_once_and_counted_in_snapshots() -> None:
    skips = Skips()
    assert skips.begin(11, 10)
    assert not skips.begin(15, 10) and not skips.begin(19, 10)
    assert skips.end(21, interval=5) == 2
    assert skips.end(30, interval=5) is None
    assert skips.begin(30, 10) and skips.end(34, interval=5) == 0
    assert skips.total == 2


@pytest.mark.parametrize("later", [-1, 3])
def test_an_incarnation_that_starts_further_back_counts_nothing_below_zero(later: int) -> None:
    skips = Skips()
    skips.begin(50, 10)
    assert skips.end(later, interval=2) == 0
