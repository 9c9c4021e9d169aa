"""Who is named as slower than its peers, and who is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.identity import shard_id
from megatron_ft.rpc.heartbeat_page import PulseReport, TrainerPhase
from megatron_ft.supervisor.heartbeats import RankReport
from megatron_ft.supervisor.stragglers import ITERATIONS, SECONDS, Stragglers

Works = Mapping[int, float]
EACH = 0.1
"""Seconds of an iteration."""


def reports(works: Works, now: float, **known: Any) -> list[RankReport]:
    """What is heard of ranks that have trained since 0; rank is data-parallel place."""
    given = {"phase": TrainerPhase.TRAINING, "typical": EACH, "done": int(now / EACH), **known}
    return [
        RankReport(shard_id(dp=r), f"n{r}", now, PulseReport(rank=r, work=work, **given))
        for r, work in works.items()
    ]


def named(works: Callable[[float], Works], seconds: float = 2 * SECONDS) -> list[int]:
    """Ranks that are named, by what each works at a moment."""
    watched, found = Stragglers(), []
    for tick in range(int(2 * seconds)):
        heard = reports(works(tick / 2), tick / 2)
        found += [one.rank for one in watched.judge(heard, tick / 2)]
    return found


def test_the_slow_rank_is_named_once() -> None:
    assert named(lambda _: {0: 0.07, 1: 0.091, 2: 0.07}) == [1]
    assert named(lambda _: {0: 0.091, 1: 0.07}) == [0]
    assert named(lambda _: {0: 0.07, 1: 0.091, 2: 0.07}, SECONDS - 1) == [], "not yet"


def test_slow_for_a_moment_or_at_times_is_not_slow() -> None:
    assert named(lambda now: {0: 0.07, 1: 0.07 + 0.05 * (now % 15 > 5), 2: 0.07}) == []


def test_it_is_named_again_after_it_was_as_fast_as_others() -> None:
    def works(now: float) -> Works:
        return {0: 0.07, 1: 0.07 if 30 < now < 32 else 0.091, 2: 0.07}

    assert named(works, 70) == [1, 1]


def test_between_the_two_factors_nothing_changes() -> None:
    def works(now: float) -> Works:
        return {0: 0.07, 1: 0.08 if int(now) % 2 else 0.091, 2: 0.07}

    assert named(works) == [1]
    assert named(lambda _: {0: 0.07, 1: 0.08, 2: 0.07}) == []


def test_the_majority_is_never_slow() -> None:
    assert named(lambda _: {0: 0.07, 1: 0.2, 2: 0.2}) == []
    assert named(lambda _: {0: 0.07, 1: 0.1, 2: 0.1, 3: 0.07, 4: 0.07}) == [1, 2]


def test_only_peers_are_compared() -> None:
    """Stages of a pipeline have different work."""
    watched = Stragglers()
    for tick in range(200):
        heard = reports({0: 0.05, 1: 0.09}, tick)
        heard = [RankReport(shard_id(pp=h.report.rank), h.node, h.at, h.report) for h in heard]
        assert not watched.judge(heard, tick)


def test_what_costs_next_to_nothing_is_not_told() -> None:
    """Ranks of GPUs that wait for their device in a collective: the host has hardly any work."""
    assert named(lambda _: {0: 0.024, 1: 0.015, 2: 0.015}) == []


@pytest.mark.parametrize("known", [{"phase": TrainerPhase.PAUSED}, {"done": ITERATIONS - 1}])
def test_pauses_and_few_iterations_say_nothing(known: dict[str, Any]) -> None:
    watched = Stragglers()
    works = {0: 0.07, 1: 0.1, 2: 0.07}
    assert not [w for t in range(99) for w in watched.judge(reports(works, t, **known), t)]
    assert not watched.judge([], 100.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.floats(0, 1e3))
def test_who_works_least_is_never_named(works: list[float], now: float) -> None:
    watched = Stragglers()
    heard = reports(dict(enumerate(works)), now)
    later = reports(dict(enumerate(works)), now + 100)
    watched.judge(heard, now)
    for one in watched.judge(later, now + 100):
        assert one.work > min(works) and one.factor >= 1.2
        assert f"rank {one.rank} on n{one.rank} is slow" in str(one)
        assert watched.present[one.rank] == one
