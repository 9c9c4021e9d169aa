"""The cheapest way to recover: equal to a simulation of every way, and monotonic as it must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, inf, isinf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.supervisor.recovery_cost import (
    HOLD,
    IN_PLACE,
    REQUEUE,
    SHRINK,
    SPARE,
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
    clock.spend(f.restarts[SHRINK], f.nodes)
    clock.spend(comes - clock.now if f.grows else inf, f.nodes - f.fewer)
    clock.spend(f.grow, f.nodes)


def requeues(f: Figures, clock: Clock, comes: float) -> None:
    clock.lost += f.nodes * (f.queue + f.start + f.redone)


def stops(f: Figures, clock: Clock, comes: float) -> None:
    clock.spend(inf, f.nodes)


def holds(f: Figures, clock: Clock, comes: float, then: Then, longest: float) -> None:
    clock.spend(f.drain, f.nodes)
    until = min(clock.now + longest, f.left)
    clock.spend(min(comes, until) - clock.now, f.nodes)
    if comes <= until:
        clock.spend(f.restarts[SPARE], f.nodes)
    else:
        then(f, clock, comes)


def average(f: Figures, way: Callable[[Clock, float], None]) -> float:
    """Mean of what a way loses over the times at which a host may come."""

    def lost(comes: float) -> float:
        clock = Clock(f.left)
        way(clock, comes)
        return clock.lost

    total = exp(-f.left / f.host) * lost(f.left + 1)
    for cell in range(round(f.left / CELL)):
        start = cell * CELL
        share = exp(-start / f.host) - exp(-(start + CELL) / f.host)
        total += share * lost(start + CELL / 2)
    return total


def simulated(f: Figures, way: str, longest: float) -> float:
    """What a way loses, without the formulas; ``longest`` is how long a hold may last."""
    if way in (IN_PLACE, SPARE):
        return f.nodes * min(f.left, f.restarts[way])
    if way == SHRINK:
        return average(f, lambda clock, comes: shrinks(f, clock, comes))
    if way == REQUEUE:
        return f.nodes * (f.drain + f.queue + f.start + f.redone)
    possible: list[Then] = [stops]
    possible += [shrinks] * (SHRINK not in f.refused) + [requeues] * (REQUEUE not in f.refused)
    return min(
        average(f, lambda clock, comes, then=then: holds(f, clock, comes, then, longest))  # type: ignore[misc]
        for then in possible
    )


def times(most: int) -> st.SearchStrategy[float]:
    return st.integers(0, most).map(float)


@st.composite
def figures(draw: st.DrawFn, grows: st.SearchStrategy[bool] = st.booleans()) -> Figures:
    nodes = draw(st.integers(2, 64))
    refused = draw(st.sets(st.sampled_from([SHRINK, HOLD, REQUEUE])))
    return Figures(
        nodes=nodes,
        lost=draw(st.integers(0, min(3, nodes - 1))),
        spares=draw(st.integers(0, 3)),
        fewer=draw(st.integers(1, nodes - 1)),
        restarts={way: draw(times(20)) for way in (IN_PLACE, SPARE, SHRINK)},
        grow=draw(times(20)),
        grows=draw(grows),
        host=draw(st.integers(1, 200).map(float)),
        hold_limit=draw(times(40)),
        drain=draw(times(10)),
        queue=draw(times(100)),
        start=draw(times(30)),
        redone=draw(times(30)),
        left=draw(times(80)),
        refused=dict.fromkeys(refused, "the test wants it"),
    )


@settings(deadline=None, max_examples=150)
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


@settings(deadline=None, max_examples=100)
@given(figures(st.just(True)), st.floats(0, 1))
def test_no_shorter_hold_is_cheaper_where_the_job_can_grow(f: Figures, share: float) -> None:
    """With a limit that is far away, and no drain: nothing else ends a wait."""
    f = replace(f, drain=0.0, left=1e6, refused={REQUEUE: "it has no queue"})
    f = replace(f, lost=max(1, f.lost), spares=0, hold_limit=1000.0)
    shorter = expected(replace(f, hold_limit=share * f.hold_limit), HOLD)
    assert min(expected(f, HOLD), expected(f, SHRINK)) <= shorter * (1 + 1e-6)


@settings(deadline=None)
@given(figures(), st.floats(1, 10))
def test_what_takes_longer_costs_no_less(f: Figures, factor: float) -> None:
    for name in ("grow", "host", "drain", "queue", "start", "redone", "left"):
        slower = replace(f, **{name: getattr(f, name) * factor})
        for way in WAYS:
            # Another host that comes later may come too late for growing to be worth the time.
            if (name, way) not in (("host", SHRINK), ("host", HOLD)):
                assert expected(slower, way) >= expected(f, way) * (1 - 1e-9), (name, way)
    for way in (IN_PLACE, SPARE, SHRINK):
        longer = {**f.restarts, way: f.restarts[way] * factor}
        assert expected(replace(f, restarts=longer), way) >= expected(f, way) * (1 - 1e-9)


def scenario(**changes: Any) -> Figures:
    usual: dict[str, Any] = {
        "nodes": 4, "lost": 1, "spares": 0, "fewer": 3, "grow": 20.0, "grows": True,
        "restarts": {IN_PLACE: 5.0, SPARE: 10.0, SHRINK: 20.0}, "host": 1800.0,
        "hold_limit": 600.0, "drain": 10.0, "queue": 120.0, "start": 60.0, "redone": 0.0,
        "left": 86400.0,
    }  # fmt: skip
    return Figures(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"lost": 0}, IN_PLACE),
        ({"spares": 1}, SPARE),
        ({"queue": 1000.0}, SHRINK),
        ({"host": 5.0}, HOLD),
        ({"host": 20000.0, "grows": False}, REQUEUE),
        ({"left": 300.0, "grows": False}, SHRINK),
        ({"fewer": 2, "host": 30.0, "queue": 1000.0}, HOLD),
        ({"refused": {SHRINK: "no number will do"}}, REQUEUE),
        ({"refused": {way: "" if way == HOLD else "no" for way in WAYS}}, HOLD),
    ],
)
def test_scenarios(changes: dict[str, Any], way: str) -> None:
    best = cheapest(alternatives(scenario(**changes)))
    assert best is not None and best.way == way, alternatives(scenario(**changes))


def test_no_way_is_taken_where_none_is_possible() -> None:
    refused = dict.fromkeys((SHRINK, HOLD, REQUEUE), "no")
    assert cheapest(alternatives(scenario(refused=refused))) is None
