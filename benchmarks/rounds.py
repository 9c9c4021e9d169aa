"""Timing in rounds: a yardstick and what is compared with it, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratios(
    rounds: int, yardstick: Callable[[], object], timed: Callable[[], float]
) -> tuple[float, ...]:
    """How many times faster than the yardstick ``timed`` is, round by round.

    ``timed`` returns its own seconds.  One round before them is not counted: it faults
    pages in.  What else the machine does hits both sides of a round alike.
    """
    found = []
    for number in range(rounds + 1):
        unit = seconds(yardstick)
        if number:
            found.append(unit / timed())
        else:
            timed()
    return tuple(found)
