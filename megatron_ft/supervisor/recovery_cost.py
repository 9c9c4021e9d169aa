"""Expected cost of each way to recover from a loss, in lost node-seconds, and the cheapest.  Pure.

A way loses the node-seconds in which nodes of the job do not train although they could, from the
decision to the end of the job's time.  Hosts in place of those that are lost come together, after
a time that is exponentially distributed.  docs/reshape.md has a table of scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf
from typing import NamedTuple

IN_PLACE, SPARE, SHRINK, HOLD, REQUEUE = "in place", "spare", "shrink", "hold", "requeue"
WAYS = (IN_PLACE, SPARE, SHRINK, HOLD, REQUEUE)
"""All ways; of two that cost the same, the first is taken."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Numbers that a decision follows from; times in seconds from the decision on.

    ``lost`` of ``nodes`` are lost, ``spares`` are free; with ``fewer`` nodes the job could go on.
    ``restarts`` are the times from a failure to training, by IN_PLACE, SPARE (also for a host
    that has come) and SHRINK; ``grow`` is that of taking a host back, if the job ``grows``.  The
    mean time until all hosts are there is ``host``.  A hold lasts ``hold_limit`` at most, behind
    the ``drain`` that goes before it and before the end of a job, which is started again after
    ``queue``, takes ``start``, and does work of ``redone`` again.  ``left`` is the job's time.
    ``refused`` are ways that cannot be, with the reason.
    """

    nodes: int
    lost: int
    spares: int
    fewer: int
    restarts: Mapping[str, float]
    grow: float
    grows: bool
    host: float
    hold_limit: float
    drain: float
    queue: float
    start: float
    redone: float
    left: float
    refused: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, way: str) -> str:
        """The reason why a way cannot be; empty if it can."""
        if way == IN_PLACE and self.lost:
            return f"{self.lost} of {self.nodes} nodes are lost"
        if way == SPARE and self.spares < self.lost:
            return f"{self.spares} spares for {self.lost} nodes"
        return self.refused.get(way, "")


class Alternative(NamedTuple):
    """A way and the node-seconds that it is expected to lose, inf if it cannot be: ``why_not``."""

    way: str
    node_seconds: float
    why_not: str = ""


def alternatives(figures: Figures) -> list[Alternative]:
    """Every way, in the order of WAYS."""
    return [Alternative(w, expected(figures, w), figures.why_not(w)) for w in WAYS]


def cheapest(ways: list[Alternative]) -> Alternative | None:
    """The way that is expected to lose the least; None if none can be."""
    best = min(ways, key=lambda one: one.node_seconds)
    return None if best.why_not else best


def expected(figures: Figures, way: str) -> float:
    """Expected lost node-seconds of a way, inf if it cannot be."""
    if figures.why_not(way):
        return inf
    if way == SHRINK:
        return _shrink(figures, figures.left)
    if way == HOLD:
        return _hold(figures)
    if way == REQUEUE:
        return figures.nodes * (figures.drain + _again(figures))
    return figures.nodes * min(figures.restarts[way], figures.left)


def _again(figures: Figures) -> float:
    """Seconds from the end of the job until its next start is where this one was."""
    return figures.queue + figures.start + figures.redone


def _shrink(figures: Figures, left: float) -> float:
    """All nodes reshape; those that lack are lost until they are back; then all grow."""
    nodes, lacking = figures.nodes, figures.nodes - figures.fewer
    down = min(figures.restarts[SHRINK], left)
    if not figures.grows:
        return nodes * down + lacking * (left - down)
    absent = _absent(figures.host, down, left)
    growing = _present(figures.host, max(down, left - figures.grow), left, left)
    return nodes * (down + growing) + lacking * absent


def _hold(figures: Figures) -> float:
    """All nodes wait behind a drain; without a host at the end, the cheapest other way follows.

    How long to wait at most needs no choice where the job can grow: the derivative of the cost by
    that time keeps its sign, so the best is not at all or as long as may be.
    """
    nodes, left, restart = figures.nodes, figures.left, figures.restarts[SPARE]
    drained = min(figures.drain, left)
    until = min(drained + figures.hold_limit, left)
    waiting = drained + _absent(figures.host, drained, until)
    restarting = _present(figures.host, max(drained, left - restart), left, until)
    then = [nodes * (left - until)]
    if not figures.why_not(SHRINK):
        then.append(_shrink(figures, left - until))
    if not figures.why_not(REQUEUE):
        then.append(nodes * _again(figures))
    return nodes * (waiting + restarting) + exp(-until / figures.host) * min(then)


def _absent(mean: float, start: float, stop: float) -> float:
    """Expected seconds from ``start`` to ``stop`` in which the hosts are not there."""
    return mean * (exp(-start / mean) - exp(-stop / mean))


def _present(mean: float, start: float, stop: float, until: float) -> float:
    """The same in which they are there, if those that come after ``until`` do not count.

    Work of some seconds that begins when they come, or when they may be taken at the earliest,
    lasts so long up to ``stop`` if ``start`` is that much before it, but not before the earliest
    time: it is the difference of the time with hosts and of the same, so much later.
    """
    split = min(max(start, until), stop)
    late = (stop - split) * (1 - exp(-until / mean))
    return max(0.0, split - start - _absent(mean, start, split)) + late
