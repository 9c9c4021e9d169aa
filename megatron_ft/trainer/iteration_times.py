"""What an iteration takes with and without a snapshot under way, on one rank."""

from __future__ import annotations

from collections import deque
from statistics import median

QUIET_WINDOW = 32
SHADOW_WINDOW = 9
MOST_BUSY = 256
"""A snapshot under way for longer than so many iterations says nothing of its shadow."""


class IterationTimes:
    """Learns the usual iteration and the shadow of a snapshot: by how much iterations are longer
    while it is copied, encoded and committed, besides the time that training is held for it.

    Both are medians, in seconds, 0 until known.  An iteration that takes more than twice the
    usual one had another reason (an evaluation, a checkpoint) and counts as twice.
    Written by the training thread alone; others read the two numbers.
    """

    def __init__(self) -> None:
        self.iteration_seconds = 0.0
        self.shadow_seconds = 0.0
        self._quiet: deque[float] = deque(maxlen=QUIET_WINDOW)
        self._shadows: deque[float] = deque(maxlen=SHADOW_WINDOW)
        self._busy: list[float] = []
        self._began: tuple[float, float, bool] | None = None

    def begin(self, now: float, stall: float, busy: bool) -> None:
        """An iteration begins: the time, all stalls so far, whether a snapshot is under way."""
        self._began = (now, stall, busy)

    def end(self, now: float, stall: float) -> None:
        """It has ended.  Stalls in it are none of its time: they are counted by themselves."""
        if self._began is None:
            return
        then, stall_then, busy = self._began
        self._began = None
        seconds = max(0.0, now - then - (stall - stall_then))
        if busy:
            self._busy.append(seconds)
            del self._busy[MOST_BUSY + 1 :]
            return
        self._settle()
        self._quiet.append(seconds)
        self.iteration_seconds = median(self._quiet)

    def _settle(self) -> None:
        """The snapshot is over: what its iterations took beyond the usual is its shadow."""
        busy, self._busy = self._busy, []
        usual = self.iteration_seconds
        if not busy or not usual or len(busy) > MOST_BUSY:
            return
        self._shadows.append(sum(min(seconds, 2 * usual) - usual for seconds in busy))
        self.shadow_seconds = max(0.0, median(self._shadows))
