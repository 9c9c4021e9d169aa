"""Expected cost of each way to recover from a loss, in lost node-seconds, and the cheapest.  Pure.

A way loses the node-seconds in which nodes of the job do not train although they could, from the
decision to the end of the job's time.  Hosts in place of those that are lost come together, after
a time that is exponentially distributed.  docs/how-to/launchers.md has a table of scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import NamedTuple

from megatron_ft.core.identity import HOLD, SHRINK

IN_PLACE, SPARE, REQUEUE = "in place", "spare", "requeue"
WAYS = (IN_PLACE, SPARE, SHRINK, HOLD, REQUEUE)
"""All ways; of two that cost the same, the first is taken."""

GROW, START, DRAIN, QUEUE, HOST, LEFT = "grow", "start", "drain", "queue", "host", "left"
"""Other times: to take hosts back, to start the job, to drain memory, to wait in the queue, until
hosts are there (its mean), until the end of the job's time."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Numbers that a decision follows from.

    ``lost`` of ``nodes`` are lost, ``spares`` are free.  With ``fewer`` nodes the job could
    continue; ``grows`` says that it would take back hosts that come later.  A hold lasts
    ``hold_limit`` seconds at most, behind a drain; so does the end of a job, of which a later
    start makes ``redone`` seconds again.  ``seconds`` has the times from a failure to training by
    way, SPARE also for a host that has come, and those of GROW to LEFT.  ``refused`` are reasons
    against ways; empty ones do not count.
    """

    nodes: int
    lost: int
    spares: int
    fewer: int
    grows: bool
    hold_limit: float
    redone: float
    seconds: Mapping[str, float]
    refused: Mapping[str, str]

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
    return [Alternative(w, expected(figures, w), figures.why_not(w)) for w in WAYS]


def cheapest(ways: Sequence[Alternative]) -> Alternative | None:
    """The way that is expected to lose the least; None if none can be."""
    return min((w for w in ways if not w.why_not), key=lambda w: w.node_seconds, default=None)


def expected(figures: Figures, way: str) -> float:
    """Expected lost node-seconds of a way, inf if it cannot be."""
    left = figures.seconds[LEFT]
    if figures.why_not(way):
        return inf
    if way == SHRINK:
        return _shrink(figures, left)
    if way == HOLD:
        return _hold(figures, left)
    if way == REQUEUE:
        return figures.nodes * figures.seconds[DRAIN] + _again(figures)
    return figures.nodes * min(figures.seconds[way], left)


def _again(figures: Figures) -> float:
    """From the end of the job until its next start is where this one was."""
    return figures.nodes * (figures.seconds[QUEUE] + figures.seconds[START] + figures.redone)


def _shrink(figures: Figures, left: float) -> float:
    """All nodes reshape; those that lack are lost until they are back; then all grow."""
    nodes, lacking, seconds = figures.nodes, figures.nodes - figures.fewer, figures.seconds
    down = min(seconds[SHRINK], left)
    if not figures.grows:
        return nodes * down + lacking * (left - down)
    absent = _absent(seconds[HOST], down, left)
    growing = _present(seconds[HOST], max(down, left - seconds[GROW]), left, left)
    return nodes * (down + growing) + lacking * absent


def _hold(figures: Figures, left: float) -> float:
    """All nodes wait behind a drain; without a host at the end, the cheapest other way follows.

    How long to wait at most needs no choice where the job can grow: the derivative of the cost by
    that time keeps its sign, so the best is not at all or as long as may be.
    """
    nodes, seconds = figures.nodes, figures.seconds
    drained = min(seconds[DRAIN], left)
    until = min(drained + figures.hold_limit, left)
    waiting = drained + _absent(seconds[HOST], drained, until)
    restarting = _present(seconds[HOST], max(drained, left - seconds[SPARE]), left, until)
    then = [nodes * (left - until)]
    then += [] if figures.why_not(SHRINK) else [_shrink(figures, left - until)]
    then += [] if figures.why_not(REQUEUE) else [_again(figures)]
    return nodes * (waiting + restarting) + _away(seconds[HOST], until) * min(then)


def _away(mean: float, at: float) -> float:
    """Probability that the hosts are not there yet."""
    return exp(-at / max(mean, 0.001))


def _absent(mean: float, start: float, stop: float) -> float:
    """Expected seconds from ``start`` to ``stop`` in which the hosts are not there."""
    return mean * (_away(mean, start) - _away(mean, stop))


def _present(mean: float, start: float, stop: float, until: float) -> float:
    """The same in which they are there, if those that come after ``until`` do not count.

    Work of some seconds, at most up to ``stop``, begins when hosts come, or at the earliest time
    at which they may be used.  It takes the time with hosts less the same so much later: this, with
    ``start`` so much before ``stop``, but not before the earliest time.
    """
    split = min(max(start, until), stop)
    late = (stop - split) * (1 - _away(mean, until))
    return max(0.0, split - start - _absent(mean, start, split)) + late
