"""How many iterations should lie between snapshots: a decision from what they cost.  Pure.

A snapshot that costs C seconds of training, taken every T seconds in a job that fails every M
seconds, takes C/T of all time, and each failure loses T/2 of work.  The sum C/T + T/(2M) is
least at T = sqrt(2 C M) (Young, 1974, doi:10.1145/361147.361115).  The overhead budget
bounds T from below: C/T must not exceed it, whatever would be best.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from megatron_ft.core.identity import SnapshotId

FIRST_ITERATIONS = 2
"""The interval while nothing is known of the cost."""

FASTEST_GROWTH = 10.0
"""One sample stretches the interval at most so many times: it may have been a hiccup."""

SAMPLES = 5
"""Costs that are remembered: three cheap ones of them make the interval shorter again."""


def mean_time_between_failures(expected: float, running: float, failures: int) -> float:
    """Seconds between failures of a job that has run for some time and failed so often.

    What was ``expected`` before counts like one failure seen.
    """
    return (expected + running) / (failures + 1)


def best_seconds(cost: float, budget: float, mtbf: float) -> float:
    """Seconds between snapshots of ``cost`` seconds: Young's, unless ``budget`` needs more.

    ``budget`` is the largest share of time that snapshots may take, above 0.
    """
    return max(cost / budget, math.sqrt(2.0 * cost * mtbf))


class IntervalGovernor:
    """Picks the interval of a job from the costs that its ranks report.

    ``iterations`` is the interval, ``overhead`` the share of training time that it should
    cost.  A higher cost counts at once, a lower one when it is the median of the last
    SAMPLES: to break the budget is worse than to lose an iteration more.
    """

    def __init__(self, budget: float) -> None:
        assert budget > 0
        self.iterations = FIRST_ITERATIONS
        self.overhead = 0.0
        self._budget = budget
        self._costs: deque[float] = deque(maxlen=SAMPLES)
        self._snapshot: SnapshotId | None = None
        self._before = FIRST_ITERATIONS

    def hear(self, snapshot: SnapshotId, cost: float, iteration: float, mtbf: float) -> None:
        """One rank's cost of a snapshot and its usual iteration, in seconds.

        The slowest rank counts: the others wait for it.  Nothing is decided while a rank
        knows no iteration (0).
        """
        if snapshot != self._snapshot:
            self._snapshot, self._before = snapshot, self.iterations
            self._costs.append(0.0)
        self._costs[-1] = max(self._costs[-1], cost)
        if iteration > 0:
            self._decide(iteration, mtbf)

    def _decide(self, iteration: float, mtbf: float) -> None:
        cost = max(median(self._costs), self._costs[-1])
        wanted = math.ceil(best_seconds(cost, self._budget, mtbf) / iteration)
        most = math.ceil(FASTEST_GROWTH * self._before)
        self.iterations = max(1, min(wanted, most))
        self.overhead = cost / (self.iterations * iteration)
