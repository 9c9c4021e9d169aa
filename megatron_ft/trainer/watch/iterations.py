"""How long iterations take, and how much of each is the rank's own part.  Pure.

In a synchronous job all ranks have the same iteration time, because the fast ones wait for
the slow ones.  A rank's own part is what is left without that wait: without the time from its
own last gradient to the optimizer's step, in which gradients are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FIRST_ITERATIONS = 3
"""Iterations of an incarnation that say nothing of later ones: they compile, allocate, fill
caches."""

WINDOW = 50
"""Iterations over which own parts are summed up; a window ends where the number divides."""

LEAST_OF_WINDOW = 40
"""A window with fewer iterations that count is passed over."""

_SMOOTHING = 0.1


@dataclass(frozen=True)
class WindowSummary:
    """Own parts of the iterations that end with (index + 1) * WINDOW: seconds.

    ``spread`` is their median absolute deviation.
    """

    index: int
    own: float
    spread: float


class Iterations:
    """Fed with the times at which one rank passes its marks, on any clock of seconds.

    ``done`` counts ended iterations, ``typical`` smooths their length, ``longest`` is the longest
    time between two marks, and ``window`` the newest whole window; what happened in the first
    iterations and in pauses is in none of them.
    """

    def __init__(self) -> None:
        self.done = 0
        self.typical = 0.0
        self.longest = 0.0
        self.window: WindowSummary | None = None
        self._marked: float | None = None
        self._began: float | None = None
        self._gradient: float | None = None
        self._waited: float | None = None
        self._own: list[float] = []
        self._disturbed = False
        self._stage = 0

    @property
    def marks(self) -> int:
        """How far training is: three an iteration, the same on ranks with different models."""
        return 3 * self.done + self._stage

    def gradient(self, now: float) -> None:
        """The last gradient of a backward pass is there; with several, the last one counts."""
        self._mark(now)
        self._gradient, self._stage = now, 1

    def step(self, now: float) -> None:
        """The optimizer steps: gradients have been exchanged."""
        self._mark(now)
        self._stage = 2
        if self._gradient is not None:
            self._waited = (self._waited or 0.0) + now - self._gradient
            self._gradient = None

    def ended(self, iteration: int, now: float) -> None:
        """An iteration has ended; the next one begins."""
        self._mark(now)
        if self._began is not None and not self._disturbed:
            self._count(now - self._began)
        self.done, self._stage = self.done + 1, 0
        if (iteration + 1) % WINDOW == 0:
            self.window = summarise(iteration // WINDOW, self._own) or self.window
            self._own = []
        self._began, self._waited, self._gradient = now, None, None
        self._disturbed = False

    def disturbed(self, now: float) -> None:
        """A pause begins or ends: the iteration in which it is says nothing."""
        self._marked, self._disturbed = now, True

    def _mark(self, now: float) -> None:
        if self._marked is not None and self.done >= FIRST_ITERATIONS:
            self.longest = max(self.longest, now - self._marked)
        self._marked = now

    def _count(self, seconds: float) -> None:
        if self.done < FIRST_ITERATIONS:
            return
        change = _SMOOTHING * (seconds - self.typical)
        self.typical = self.typical + change if self.typical else seconds
        if self._waited is not None:
            self._own.append(seconds - self._waited)


def summarise(index: int, own: Sequence[float]) -> WindowSummary | None:
    """Median and median absolute deviation; None if too few iterations counted."""
    if len(own) < LEAST_OF_WINDOW:
        return None
    middle = median(own)
    return WindowSummary(index, middle, median(abs(value - middle) for value in own))
