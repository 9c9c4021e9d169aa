"""The budget of the slowest iterations: snapshots wait while they make too many iterations late.

Trainers judge, as only they know their iterations (LateIterations of trainer/stats.py).  Here it is
decided how long the next snapshot waits.  An iteration that may be late beside a snapshot asks for
a rest, in which trainers see how long iterations take without one.  Each iteration that was late by
comparison costs PRICE iterations; CREDIT of them are free.  So of any n iterations no more than
n / PRICE + CREDIT are late, and those of one snapshot.
"""

from __future__ import annotations

REST = 40
"""Iterations without a snapshot after one that may be late; trainers compare it with 32 of them."""

PRICE = 400
"""Iterations that pay for a late one: a quarter of a percent.  The rest is for iterations that are
late without any snapshot."""

CREDIT = 1
"""Late iterations for which nothing waits."""

MOST_WAIT = 2000
"""Most iterations for which snapshots wait, whatever one has cost: protection must come back."""


class Debt:
    """Late iterations that are not paid for yet.  Pure.

    ``until`` is the first iteration after which a snapshot may be permitted.
    """

    def __init__(self) -> None:
        self._rest = self._paid = self._judged = self._most = 0
        self._credit = CREDIT * PRICE

    @property
    def until(self) -> int:
        """The end of the rest, or of what is owed if that is later."""
        return max(self._rest, self._paid - self._credit)

    def charge(self, iteration: int, late: int, stride: int = 1) -> None:
        """Count what a rank reports after ``iteration``: how many were late; 0: one may have been.

        Numbers of iterations rise by ``stride``.

        Ranks iterate together and speak of the same iterations, a moment apart: the one that
        counts most is charged.
        """
        if not late:
            self._rest = max(self._rest, iteration + REST * stride)
            return
        self._credit = CREDIT * PRICE * stride
        if iteration > self._judged + REST * stride // 2:
            self._judged, self._most = iteration, 0
        more, self._most = max(0, late - self._most), max(late, self._most)
        owed = max(self._paid, iteration) + more * PRICE * stride
        self._paid = min(owed, iteration + self._credit + MOST_WAIT * stride)
