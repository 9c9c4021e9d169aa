"""Figures about a trainer's snapshots: what they cost, how safe they are, how often one failed.

Counters, the lengths of iterations with and without a snapshot under way, and warnings that do not
flood logs.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

NEVER = -1
"""In place of an iteration: there is no such snapshot."""


@dataclass
class CaptureStats:
    """Counters of one SnapshotManager, since it was made.

    ``taken`` counts sealed snapshots, ``skipped`` calls of save() that captured
    nothing, ``missed`` permits whose iteration passed uncaptured, ``abandoned``
    captures that ended without a result.  ``stall_seconds`` is the time the training
    thread spent in save() while capturing and in fences; ``copied_bytes`` counts
    tensor bytes of sealed snapshots.

    ``committed_iteration`` is the newest that the job has announced to this rank, or that it has
    restored; ``protected_iteration`` the newest committed with parity; NEVER before the first.
    Written by several threads, one writer a field: read without a lock, a moment late.
    """

    taken: int = 0
    skipped: int = 0
    missed: int = 0
    abandoned: int = 0
    stall_seconds: float = 0.0
    copied_bytes: int = 0
    protected_iteration: int = NEVER
    committed_iteration: int = NEVER

    def committed(self, iteration: int, protected: bool) -> None:
        self.committed_iteration = max(self.committed_iteration, iteration)
        if protected:
            self.protected_iteration = max(self.protected_iteration, iteration)


USUAL_WINDOW = 32
SHADOW_WINDOW = 9
MOST_BUSY = 256
"""Most iterations of a snapshot that count for its shadow; a longer one says nothing."""


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
        self._usual: deque[float] = deque(maxlen=USUAL_WINDOW)
        self._shadows: deque[float] = deque(maxlen=SHADOW_WINDOW)
        self._busy: list[float] = []
        self._began: tuple[float, float, bool] | None = None

    def start(self, now: float, stall: float, busy: bool) -> None:
        """An iteration begins: the time, all stalls so far, whether a snapshot is under way."""
        self._began = (now, stall, busy)

    def end(self, now: float, stall: float) -> None:
        """End the iteration.  Its time excludes stalls, which are counted by themselves."""
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
        self._usual.append(seconds)
        self.iteration_seconds = median(self._usual)

    def _settle(self) -> None:
        """The snapshot is over: what its iterations took beyond the usual is its shadow."""
        busy, self._busy = self._busy, []
        usual = self.iteration_seconds
        if not busy or not usual or len(busy) > MOST_BUSY:
            return
        self._shadows.append(sum(min(seconds, 2 * usual) - usual for seconds in busy))
        self.shadow_seconds = max(0.0, median(self._shadows))


QUIET_WINDOW = 128
QUIET_AGE = 1024
LEAST_QUIET = 32
"""Iterations without a snapshot that say how long one takes: the last QUIET_WINDOW that are no
older than QUIET_AGE iterations, if they are LEAST_QUIET at least."""


class LateIterations:
    """Finds the iterations that a snapshot makes late: longer by more than the budget, in percent,
    than the 99th percentile of those without one.

    Something else may have slowed the machine down just then.  So an iteration that seems late,
    or has none to compare with, is a suspect; it is judged after LEAST_QUIET iterations without a
    snapshot, against these and the ones before.
    """

    def __init__(self, budget_percent: float) -> None:
        self._factor = 1 + budget_percent / 100 if budget_percent else 0.0
        self._quiet: deque[tuple[int, float]] = deque(maxlen=QUIET_WINDOW)
        self._suspects: list[float] = []
        self._count = self._fresh = 0
        self._known = 0.0

    def ended(self, seconds: float | None, busy: bool) -> int | None:
        """Note an iteration, None if it had a pause; ``busy``: a snapshot was under way.

        Returns 0 if it is a suspect, the number of late ones if suspects were judged just now.
        """
        if not self._factor or seconds is None:
            return None
        self._count += 1
        if not busy:
            self._quiet.append((self._count, seconds))
            self._fresh, self._known = self._fresh + 1, 0.0
            return self._judged() if self._suspects and self._fresh >= LEAST_QUIET else None
        self._fresh = 0
        if seconds <= self._limit():
            return None
        self._suspects.append(seconds)
        return 0

    def _judged(self) -> int | None:
        limit, suspects = self._limit(), self._suspects
        self._suspects = []
        return sum(seconds > limit for seconds in suspects) or None

    def _limit(self) -> float:
        """Longest time that is not late; 0: unknown."""
        quiet, oldest = self._quiet, self._count - QUIET_AGE
        if len(quiet) < LEAST_QUIET or quiet[-LEAST_QUIET][0] <= oldest:
            return 0.0
        if not self._known:
            usual = sorted(seconds for count, seconds in quiet if count > oldest)
            self._known = self._factor * usual[math.ceil(0.99 * len(usual)) - 1]
        return self._known


class Warner:
    """Warns at the first of a kind; later ones go to the log at level INFO."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned: set[str] = set()

    def __call__(self, once_per: str, message: str, *values: object) -> None:
        level = logging.INFO if once_per in self._warned else logging.WARNING
        self._warned.add(once_per)
        self._logger.log(level, message, *values)
