"""Stragglers of a running job: each window of iterations judged once, each change told once.

Which ranks are slower than their peers: decided from windows of their own parts.  Pure.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_ft.supervisor.watch.board import Heard
from megatron_ft.trainer.heartbeats import WINDOW, WindowSummary

LEAST_SECONDS = 0.001
"""What is slower by less than this is no matter, however short iterations are."""

SIGNIFICANT = 6.0
"""By how many standard errors a difference must exceed chance: with thousands of ranks something
that is as rare as four happens all the time."""

MEDIAN_ERROR = 1.2533 * 1.4826 / math.sqrt(WINDOW)
"""Standard error of the median of a window, in median absolute deviations.

1.2533 (the root of pi / 2) is the ratio to the mean's error, 1.4826 that of standard deviation
to median absolute deviation, both for normally distributed values.
"""

SAMPLING = 0.7
"""A rank slower by exactly the limit is measured below it every second time."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose own part of an iteration is ``excess`` (0.05: 5 %) above its peers'."""

    rank: int
    window: int
    excess: float
    own: float
    peers: float


def find_stragglers(windows: Mapping[int, WindowSummary], percent: float) -> list[Straggler]:
    """The slow ones among ranks that do the same work; ``windows`` are all of one index.

    A rank is compared with the median of the others.  It is named when it is slower by
    ``percent`` (less the error of sampling), by more than chance explains, and by a
    millisecond.  0 percent names nobody, and so does a rank without peers.
    """
    if percent <= 0 or len(windows) < 2:
        return []
    found = (_judge(rank, windows, percent / 100) for rank in sorted(windows))
    return [straggler for straggler in found if straggler is not None]


def _judge(rank: int, windows: Mapping[int, WindowSummary], limit: float) -> Straggler | None:
    mine = windows[rank]
    others = [w for r, w in windows.items() if r != rank]
    peers = median(w.own for w in others)
    excess = mine.own - peers
    error = MEDIAN_ERROR * math.hypot(mine.spread, median(w.spread for w in others))
    least = max(SAMPLING * limit * peers, SIGNIFICANT * error, LEAST_SECONDS)
    if peers <= 0 or excess < least:
        return None
    return Straggler(rank, mine.index, excess / peers, mine.own, peers)


_DATA_PARALLEL = re.compile(r"dp\d+")


class StragglerFinder:
    """Compares ranks that hold the same part of the model, on data of their own."""

    def __init__(self, percent: float) -> None:
        self._percent = percent
        self._judged: dict[str, int] = {}
        self._slow: dict[str, dict[int, Straggler]] = {}

    @property
    def present(self) -> list[Straggler]:
        """Those of the newest windows."""
        return [one for group in self._slow.values() for one in group.values()]

    def begin_incarnation(self) -> None:
        """Ranks may be on other nodes now, and start at another iteration."""
        self._judged.clear()
        self._slow.clear()

    def look(self, heard: Sequence[Heard]) -> list[str]:
        """What is new, for people."""
        groups: dict[str, list[Heard]] = defaultdict(list)
        for one in heard:
            groups[_DATA_PARALLEL.sub("dp", one.shard)].append(one)
        return [text for name, members in groups.items() for text in self._judge(name, members)]

    def _judge(self, name: str, members: Sequence[Heard]) -> list[str]:
        indices = {one.report.window for one in members}
        if len(indices) != 1 or (index := indices.pop()) <= self._judged.get(name, -1):
            return []
        self._judged[name] = index
        windows = {
            one.report.rank: WindowSummary(index, one.report.own, one.report.spread)
            for one in members
        }
        before = self._slow.get(name, {})
        now = {s.rank: s for s in find_stragglers(windows, self._percent)}
        self._slow[name] = now
        nodes = {one.report.rank: one.node for one in members}
        fresh = [_describe(now[rank], nodes[rank]) for rank in sorted(now.keys() - before.keys())]
        gone = sorted(before.keys() - now.keys())
        return fresh + [f"rank {rank} on {nodes[rank]} is no straggler any more" for rank in gone]


def _describe(slow: Straggler, node: str) -> str:
    first = slow.window * WINDOW
    return (
        f"rank {slow.rank} on {node} is a straggler: in iterations {first} to {first + WINDOW - 1} "
        f"its own part took {1e3 * slow.own:.1f} ms, {100 * slow.excess:.0f} % more than its "
        f"peers' {1e3 * slow.peers:.1f} ms"
    )
