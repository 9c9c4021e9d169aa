"""The judge of chaos cases: it passes what was promised, and sees each way to break a promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli.chaos.judge import Story, Struck, judge
from megatron_ft.cli.chaos.trace import Lines
from megatron_ft.cli.run import EXIT_NO_SPARE, EXIT_UNRECOVERABLE
from megatron_ft.supervisor.event_log import LoggedEvent
from tests.support.chaos_events import ORACLE, commit, event, restoring, trained

EVENTS = [
    event(0, "trainers_started"),
    commit(1, 4),
    event(1.5, "drained", iteration=4),
    commit(2, 6),
    commit(3, 8, "local"),
    event(5, "node_lost", node="n1"),
    restoring(6, 6, "parity"),
    event(7, "trainers_started"),
    commit(8, 10),
]
GOOD = Story(
    parity=1,
    events=EVENTS,
    strikes=[Struck(4, "n1 lost", (1,), ("n1",))],
    traces={0: trained(*range(1, 10), *range(7, 13)), 1: trained(*range(1, 13), rank=1)},
    oracle=ORACLE,
    reached=True,
    end="finished",
)


def with_restore(one: LoggedEvent, story: Story = GOOD) -> Story:
    events = [one if e.kind == "restoring" else e for e in story.events]
    return replace(story, events=events)


def test_a_job_that_kept_its_promises_passes() -> None:
    verdict = judge(GOOD)
    assert verdict.good, verdict.problems
    (restore,) = verdict.restores
    assert (restore.iteration, restore.least, restore.lost) == (6, 6, 1)
    assert verdict.compared == 27


def flipped(lines: Lines, number: int, **changes: str) -> Lines:
    return [line | changes if line["iteration"] == number else line for line in lines]


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        (replace(GOOD, reached=False), "never reached"),
        (replace(GOOD, end="hang", reason="waited 9 s for n1"), "hang: waited 9 s for n1"),
        (replace(GOOD, end="stopped", code=EXIT_NO_SPARE, reason="no spare"), "stopped: no sp"),
        (replace(GOOD, end="stopped", code=EXIT_UNRECOVERABLE, disk=False), "the job stopped"),
        (with_restore(restoring(6, 4, "parity")), "iteration 4 was restored from parity.*6 was s"),
        (with_restore(restoring(6, 6, "disk")), "the disk was taken with 1 nodes lost"),
        (with_restore(event(6, "other")), "started again from nothing"),
        (replace(GOOD, strikes=[]), "n1 was given up, and nothing had struck it"),
        (replace(GOOD, traces={**GOOD.traces, 1: flipped(ORACLE[1], 9, state="x")}), "1 iter.* 9"),
        (replace(GOOD, traces={**GOOD.traces, 0: trained(1, 2, 3, 9)}), "from iteration 3 to 9"),
        (replace(GOOD, traces={**GOOD.traces, 1: trained(*range(1, 40), rank=1)}), "30: not in"),
        (replace(GOOD, traces={}), "nothing was trained"),
    ],
)
def test_every_broken_promise_is_seen(forged: Story, words: str) -> None:
    problems = judge(forged).problems
    assert problems
    assert any(pytest.importorskip("re").search(words, problem) for problem in problems), problems


def test_a_line_of_an_earlier_incarnation_counts_as_much_as_the_last_one() -> None:
    """An iteration that was wrong and then trained again, right, was wrong."""
    lines = [*flipped(trained(*range(1, 10)), 8, loss="0x0p+0"), *trained(*range(7, 13))]
    assert "rank 0 iteration 8: loss differ" in judge(replace(GOOD, traces={0: lines})).problems[0]


def test_too_many_losses_are_served_by_the_disk_or_refused() -> None:
    gone = replace(GOOD, strikes=[Struck(4, "both lost", (0, 1), ("n0", "n1"))])
    assert judge(with_restore(restoring(6, 4, "disk"), gone)).good
    late = judge(with_restore(restoring(6, 2, "disk"), gone)).problems
    assert late and "4 was safe" in late[0]
    refused = replace(gone, events=EVENTS[:6], end="stopped", code=EXIT_UNRECOVERABLE)
    assert judge(replace(refused, disk=False)).good
    assert not judge(refused).good, "there was a disk"
    assert not judge(replace(refused, disk=False, code=2)).good


def test_with_no_node_lost_a_local_snapshot_must_be_used() -> None:
    killed = replace(GOOD, strikes=[Struck(4, "a trainer killed", (), ("n1",))])
    assert "8 was safe" in judge(killed).problems[0]
    assert judge(with_restore(restoring(6, 8, "own memory"), killed)).good


def test_losses_count_until_a_later_incarnation_has_protected_all_again() -> None:
    second = [Struck(4, "", (1,), ("n1",)), Struck(9, "", (0,), ("n0",))]
    more = [*EVENTS, event(9.5, "node_lost", node="n0"), restoring(10, 10, "parity")]
    after = replace(GOOD, events=[*more, event(11, "trainers_started")], strikes=second)
    assert judge(after).good and judge(after).restores[1].lost == 1
    too_early = [Struck(4, "", (1,), ("n1",)), Struck(7.5, "", (0,), ("n0",))]
    early = judge(replace(after, strikes=too_early))
    assert early.restores[1].lost == 2, (
        "the commit at 8 was of an incarnation that began before the loss"
    )


def test_memory_of_a_suspended_node_is_lost_only_when_the_job_gives_it_up() -> None:
    stopped = Struck(4, "SMP of n1 stopped", (), (), {"n1": 1})
    assert judge(replace(GOOD, strikes=[stopped])).restores[0].lost == 1
    events = [e for e in EVENTS if e.kind != "node_lost"]
    kept = judge(replace(GOOD, strikes=[stopped], events=events))
    assert kept.restores[0].lost == 0 and "8 was safe" in kept.problems[0]


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 3))
def test_more_losses_never_raise_what_is_due(lost: list[int], parity: int) -> None:
    def least(positions: list[int]) -> int:
        strikes = [Struck(4, "", tuple(positions), ("n1",))]
        return judge(replace(GOOD, strikes=strikes, parity=parity)).restores[0].least

    dues = [least(lost[:count]) for count in range(len(lost) + 1)]
    assert dues == sorted(dues, reverse=True) and dues[-1] >= 4
