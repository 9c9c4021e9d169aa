"""The cheapest way to recover: equal to a simulation of every way, and monotonic as it must be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import exp, inf, isinf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.identity import HOLD, SHRINK
from megatron_ft.supervisor.recovery_cost import (
    DRAIN,
    GROW,
    HOST,
    IN_PLACE,
    LEFT,
    QUEUE,
    REQUEUE,
    SPARE,
    START,
    WAYS,
    Figures,
    alternatives,
    cheapest,
    expected,
)

CELL = 0.25
"""Seconds by which the time at which a host comes is sampled; all other times are multiples."""


class Clock:
    """Adds up what is lost from moment to moment, up to the end of the job's time."""

    def __init__(self, left: float) -> None:
        self.left, self.now, self.lost = left, 0.0, 0.0

    def spend(self, seconds: float, nodes: float) -> None:
        seconds = max(0.0, min(seconds, self.left - self.now))
        self.now, self.lost = self.now + seconds, self.lost + seconds * nodes


Then = Callable[[Figures, Clock, float], None]


def shrinks(f: Figures, clock: Clock, comes: float) -> None:
    clock.spend(f.seconds[SHRINK], f.nodes)
    clock.spend(comes - clock.now if f.grows else inf, f.nodes - f.fewer)
    clock.spend(f.seconds[GROW], f.nodes)


def requeues(f: Figures, clock: Clock, comes: float) -> None:
    clock.lost += f.nodes * (f.seconds[QUEUE] + f.seconds[START] + f.redone)


def stops(f: Figures, clock: Clock, comes: float) -> None:
    clock.spend(inf, f.nodes)


def holds(f: Figures, clock: Clock, comes: float, then: Then, longest: float) -> None:
    clock.spend(f.seconds[DRAIN], f.nodes)
    until = min(clock.now + longest, f.seconds[LEFT])
    clock.spend(min(comes, until) - clock.now, f.nodes)
    if comes <= until:
        clock.spend(f.seconds[SPARE], f.nodes)
    else:
        then(f, clock, comes)


def average(f: Figures, way: Callable[[Clock, float], None]) -> float:
    """Mean of what a way loses over the times at which a host may come."""

    def lost(comes: float) -> float:
        clock = Clock(f.seconds[LEFT])
        way(clock, comes)
        return clock.lost

    total = exp(-f.seconds[LEFT] / f.seconds[HOST]) * lost(f.seconds[LEFT] + 1)
    for cell in range(round(f.seconds[LEFT] / CELL)):
        start = cell * CELL
        share = exp(-start / f.seconds[HOST]) - exp(-(start + CELL) / f.seconds[HOST])
        total += share * lost(start + CELL / 2)
    return total


def simulated(f: Figures, way: str, longest: float) -> float:
    """What a way loses, without the formulas; ``longest`` is how long a hold may last."""
    if way in (IN_PLACE, SPARE):
        return f.nodes * min(f.seconds[LEFT], f.seconds[way])
    if way == SHRINK:
        return average(f, lambda clock, comes: shrinks(f, clock, comes))
    if way == REQUEUE:
        return f.nodes * (f.seconds[DRAIN] + f.seconds[QUEUE] + f.seconds[START] + f.redone)
    possible: list[Then] = [stops]
    possible += [shrinks] * (SHRINK not in f.refused) + [requeues] * (REQUEUE not in f.refused)
    return min(
        average(f, lambda clock, comes, then=then: holds(f, clock, comes, then, longest))  # type: ignore[misc]
        for then in possible
    )


def times(most: int) -> st.SearchStrategy[float]:
    return st.integers(0, most).map(float)


MOST = {IN_PLACE: 20, SPARE: 20, SHRINK: 20, GROW: 20, DRAIN: 10, QUEUE: 100, START: 30, LEFT: 80}


@st.composite
def figures(draw: st.DrawFn) -> Figures:
    drawn = {name: draw(times(most)) for name, most in MOST.items()}
    nodes = draw(st.integers(2, 64))
    refused = draw(st.sets(st.sampled_from([SHRINK, HOLD, REQUEUE])))
    return Figures(
        nodes=nodes,
        lost=draw(st.integers(0, min(3, nodes - 1))),
        spares=draw(st.integers(0, 3)),
        fewer=draw(st.integers(1, nodes - 1)),
        grows=draw(st.booleans()),
        hold_limit=draw(times(40)),
        redone=draw(times(30)),
        seconds={HOST: draw(st.integers(1, 200).map(float)), **drawn},
        refused=dict.fromkeys(refused, "the test wants it"),
    )


@settings(max_examples=150)
@given(figures())
def test_it_is_what_a_simulation_of_every_way_finds(f: Figures) -> None:
    best, ways = inf, alternatives(f)
    assert [way.way for way in ways] == list(WAYS)
    for way, cost, why_not in ways:
        if why_not:
            assert isinf(cost)
            continue
        found = simulated(f, way, f.hold_limit)
        assert cost == pytest.approx(found, rel=0.01, abs=0.01), way
        best = min(best, found)
    chosen = cheapest(ways)
    assert (chosen is None) == isinf(best)
    assert chosen is None or (
        not chosen.why_not and chosen.node_seconds == pytest.approx(best, rel=0.01, abs=0.01)
    )


def other(f: Figures, **seconds: float) -> Figures:
    """The same with other times."""
    return replace(f, seconds={**f.seconds, **seconds})


@given(figures(), st.floats(0, 1))
def test_no_shorter_hold_is_cheaper_where_the_job_can_grow(f: Figures, share: float) -> None:
    """With a limit that is far away, and no drain: nothing else ends a wait."""
    f = replace(other(f, drain=0.0, left=1e6), refused={REQUEUE: "it has no queue"}, grows=True)
    shorter = expected(replace(f, hold_limit=share * f.hold_limit), HOLD)
    assert min(expected(f, HOLD), expected(f, SHRINK)) <= shorter * (1 + 1e-6)


EXCEPTIONS = {(HOST, SHRINK), (HOST, HOLD), (DRAIN, HOLD)}
"""A host that comes too late for the job to grow costs less than one just before, and one may
come while the drain before a hold takes longer."""


@given(figures(), st.sampled_from(sorted(MOST)), st.floats(1, 10))
def test_what_takes_longer_costs_no_less(f: Figures, name: str, factor: float) -> None:
    slower = [other(f, **{name: f.seconds[name] * factor}), replace(f, redone=f.redone * factor)]
    for way, one in itertools.product(WAYS, slower):
        if (name, way) not in EXCEPTIONS:
            assert expected(one, way) >= expected(f, way) * (1 - 1e-9)


@given(figures(), st.integers(0, 100))
def test_a_node_more_on_which_to_continue_costs_no_more(f: Figures, fewer: int) -> None:
    more = replace(f, fewer=min(f.nodes, max(f.fewer, fewer)))
    assert expected(more, SHRINK) <= expected(f, SHRINK) * (1 + 1e-9)


USUAL = Figures(
    nodes=4, lost=1, spares=0, fewer=3, grows=True, hold_limit=600.0, redone=0.0, refused={},
    seconds={
        IN_PLACE: 5.0, SPARE: 10.0, SHRINK: 20.0, GROW: 20.0, START: 60.0, DRAIN: 10.0,
        QUEUE: 120.0, HOST: 1800.0, LEFT: 86400.0,
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "seconds", "way"),
    [
        ({"lost": 0}, {}, IN_PLACE),
        ({"spares": 1}, {}, SPARE),
        ({}, {QUEUE: 1000.0}, SHRINK),
        ({}, {HOST: 5.0}, HOLD),
        ({"grows": False}, {HOST: 20000.0}, REQUEUE),
        ({"grows": False}, {LEFT: 300.0}, SHRINK),
        ({"fewer": 2}, {HOST: 20.0}, HOLD),
        ({"refused": {SHRINK: "no number will do"}}, {}, REQUEUE),
        ({"refused": {SHRINK: "no", HOLD: "", REQUEUE: "no"}}, {}, HOLD),
    ],
)
def test_scenarios(changes: dict[str, Any], seconds: dict[str, float], way: str) -> None:
    ways = alternatives(other(replace(USUAL, **changes), **seconds))
    best = cheapest(ways)
    assert best is not None and best.way == way, ways


def test_no_way_is_taken_where_none_is_possible() -> None:
    nothing = alternatives(replace(USUAL, refused=dict.fromkeys((SHRINK, HOLD, REQUEUE), "no")))
    assert cheapest(nothing) is None
    assert nothing[0] == (IN_PLACE, inf, "1 of 4 nodes are lost")
