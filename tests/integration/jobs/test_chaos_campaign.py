"""The random campaign: its plan, its judge by forged stories, and a minute of it."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli.chaos.judge import Story, Struck
from megatron_ft.cli.run import EXIT_BUDGET, EXIT_NO_SPARE, EXIT_UNRECOVERABLE
from megatron_ft.supervisor.event_log import LoggedEvent
from tests.support.campaign import rule as j
from tests.support.campaign.__main__ import main
from tests.support.campaign.plan import (
    FAULTS_PER_JOB,
    OF_DRAINS,
    SCHEMES,
    TRANSPORTS,
    WEIGHTS,
    jobs,
)
from tests.support.campaign.rule import rule
from tests.support.chaos_events import ORACLE, commit, event, restoring, trained


@given(st.integers(0, 1 << 32))
def test_a_seed_stands_for_the_same_jobs_and_faults_everywhere(seed: int) -> None:
    plans = list(itertools.islice(jobs(seed), 20))
    assert plans == list(itertools.islice(jobs(seed), 20))
    shapes = {(plan.protect, plan.transport) for plan in plans}
    assert shapes == set(itertools.product(SCHEMES, TRANSPORTS))
    for plan in plans:
        assert plan.spares in (0, 1, 2) and plan.slots in (2, 3)
        kinds = {e.first.kind for e in plan.episodes} | {
            e.second.kind for e in plan.episodes if e.second
        }
        assert kinds <= set(WEIGHTS) and len(plan.episodes) == FAULTS_PER_JOB
        assert plan.drains or not kinds & OF_DRAINS


def test_another_seed_stands_for_other_faults_and_all_kinds_are_drawn() -> None:
    drawn = {e.first.kind for plan in itertools.islice(jobs(7), 60) for e in plan.episodes}
    assert drawn == set(WEIGHTS)
    assert next(jobs(1)) != next(jobs(2))
    assert {plan.protect for plan in itertools.islice(jobs(7, ("rs:2+2",)), 5)} == {"rs:2+2"}


SINCE = 3.5
EVENTS = [
    event(0, "trainers_started"),
    commit(1, 4),
    commit(2, 6),
    commit(3, 8, "local"),
    restoring(6, 8, "own memory"),
    event(7, "trainers_started"),
    commit(8, 10),
]
KILLED = Story(
    parity=1,
    events=EVENTS,
    strikes=[Struck(4, "trainers killed")],
    traces={0: trained(*range(1, 10), *range(9, 13)), 1: trained(*range(1, 13), rank=1)},
    oracle=ORACLE,
    reached=True,
    end="settled",
    starts=[(0.5, 0), (0.6, 0), (7.2, 8), (7.3, 8)],
)


def instead(story: Story, kind: str, *others: LoggedEvent) -> Story:
    """The story with other events in the place of those of a kind."""
    kept = [e for e in story.events if e.kind != kind]
    return replace(story, events=[*kept, *others])


def stopped(code: int, *strikes: Struck, disk: bool = False) -> Story:
    end = event(6, "stopped", code=code)
    drained = [event(1.5, "drained", iteration=4)] if disk else []
    events = [*EVENTS[:4], *drained, end]
    return replace(KILLED, events=events, strikes=strikes, end="stopped", starts=())


OLDER = replace(instead(KILLED, "restoring", restoring(6, 6, "parity")), starts=[(7.2, 6)])
LOST = Struck(4, "n0 lost", (0,), ("n0",))
LOST_TOO = Struck(4, "n1 lost", (1,), ("n1",))
OTHER_ITERATION = {"iteration": 5, "loss": "0x0p+0", "state": "s5"}


@pytest.mark.parametrize(
    ("story", "outcome", "words"),
    [
        (KILLED, j.RIGHT, ""),
        (replace(KILLED, traces={0: [*ORACLE[0][:4], OTHER_ITERATION]}), j.WRONG_BYTES, "5: loss"),
        (replace(KILLED, starts=[(7.2, 8), (7.3, 0)]), j.WRONG_START, "0, where 8 was decided"),
        (replace(KILLED, starts=[(7.2, 6)]), j.WRONG_START, "6, where 8"),
        (instead(KILLED, "restoring"), j.WRONG_START, "from nothing"),
        (OLDER, j.LOST, "6 was .* 8 was safe"),
        (replace(KILLED, end="hang", reason="waited 9 s"), j.HANG, "waited 9 s"),
        (replace(KILLED, events=[*EVENTS, event(9, "node_lost", node="n1")]), j.GIVEN_UP, "n1"),
        (stopped(EXIT_BUDGET, LOST), j.NEEDLESS, "1 nodes lost"),
        (stopped(EXIT_NO_SPARE, Struck(4, "damage", (0,), (), {"n0": 0})), j.NEEDLESS, "stopped"),
        (stopped(EXIT_NO_SPARE, LOST), j.HONEST, ""),
        (stopped(EXIT_UNRECOVERABLE, LOST), j.NEEDLESS, "1 nodes lost"),
        (stopped(EXIT_UNRECOVERABLE, LOST, LOST_TOO), j.HONEST, ""),
        (stopped(EXIT_UNRECOVERABLE, LOST, LOST_TOO, disk=True), j.NEEDLESS, "2 nodes lost"),
    ],
)
def test_the_judge_sees_each_way_to_break_a_promise(story: Story, outcome: str, words: str) -> None:
    if outcome == j.WRONG_START and story.starts != KILLED.starts:
        assert rule(replace(story, starts=()), SINCE, 0).outcome == j.RIGHT
    ruling = rule(story, SINCE, 0)
    assert ruling.outcome == outcome, ruling
    assert ruling.good == (outcome in (j.RIGHT, j.HONEST)) == (not ruling.problems)
    assert ruling.good or re.search(words, ruling.problems[0])


def test_a_spare_makes_a_stop_for_want_of_a_node_needless() -> None:
    assert rule(stopped(EXIT_NO_SPARE, LOST), SINCE, 0).good
    assert rule(stopped(EXIT_NO_SPARE, LOST), SINCE, 1).outcome == j.NEEDLESS


def test_what_happened_before_the_fault_is_not_its_fault() -> None:
    early = [event(3.1, "node_lost", node="n1"), event(3.2, "stopped", code=EXIT_NO_SPARE)]
    assert rule(replace(KILLED, events=[*EVENTS[:4], *early, *EVENTS[4:]]), SINCE, 0).good


def test_the_worst_is_told_first() -> None:
    lines = {0: [*ORACLE[0][:4], OTHER_ITERATION]}
    assert rule(replace(OLDER, end="hang", traces=lines), SINCE, 0).outcome == j.WRONG_BYTES
    assert rule(replace(OLDER, end="hang", starts=()), SINCE, 0).outcome == j.LOST


@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_random_faults(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, table = tmp_path / "found.json", tmp_path / "table.md"
    words = ["--seed", "20", "--minutes", "4", "--faults", "3", "--jobs", "2"]
    code = main([*words, "--json", str(found), "--markdown", str(table)])
    out = capfd.readouterr().out
    assert code == 0, out
    episodes = json.loads(found.read_text())
    assert len(episodes) >= 2 and {e["outcome"] for e in episodes} <= {j.RIGHT, j.HONEST}
    summary = re.search(r"(\d+) faults in \d+ jobs, 0 promises broken", table.read_text())
    assert summary and int(summary[1]) >= 3, table.read_text()
