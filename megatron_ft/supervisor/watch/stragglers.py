"""Which ranks are slower than their peers: decided from windows of their own parts.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from megatron_ft.trainer.watch.iterations import WINDOW, WindowSummary

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
