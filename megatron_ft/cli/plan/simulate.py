"""Simulates a planned job failure by failure, for traces and for many random runs.  Pure.

Nothing of ``model.py`` but sizes and durations is used: survival and ETTR are found by counting.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_ft.cli.plan.model import Forecast


class Strike(NamedTuple):
    """A failure, in seconds since the job's beginning; ``node`` is -1 if no node is lost."""

    at: float
    node: int = -1


class SimulatedRun(NamedTuple):
    """A run that was simulated: its ETTR, and how often memory did not save it."""

    ettr: float
    from_disk: int


def strikes(forecast: Forecast, chance: random.Random) -> Iterator[Strike]:
    """Failures without end: a Poisson process, all nodes alike."""
    job, at = forecast.job, 0.0
    while True:
        at += chance.expovariate(1 / job.mtbf)
        yield Strike(at, chance.randrange(job.nodes) if chance.random() < job.node_share else -1)


def simulate(forecast: Forecast, failures: Iterable[Strike]) -> SimulatedRun:
    run = _Run(forecast)
    for strike in failures:
        if strike.at >= forecast.job.run:
            break
        run.strike(strike)
    return SimulatedRun(run.made_until(forecast.job.run) / forecast.job.run, run.from_disk)


def monte_carlo(forecast: Forecast, runs: int, seed: int) -> list[SimulatedRun]:
    """``runs`` random runs, the lowest ETTR first."""
    chance = random.Random(seed)
    return sorted(simulate(forecast, strikes(forecast, chance)) for _ in range(runs))


class _Run:
    """The state of a job between two failures.

    Training continues at ``up`` with ``base`` seconds of work; memory is complete from ``whole``
    on, until then the nodes in ``lost`` are missing.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._of, self.from_disk = forecast, 0
        self._up = self._whole = self._base = 0.0
        self._lost: set[int] = set()
        self._spares = [0.0] * forecast.spares
        """Times at which each node that does not train can take over."""
        self._work, self._safe = forecast.work, forecast.safe_seconds
        self._period = forecast.work + forecast.cost_seconds
        self._repair, self._most = forecast.repair_seconds, forecast.scheme.parity_members
        self._set_of = [i for i, size in enumerate(forecast.set_sizes) for _ in range(size)]

    def made_until(self, at: float) -> float:
        """Seconds of work that are done, saved or not."""
        full, rest = divmod(max(0.0, at - self._up), self._period)
        return self._base + full * self._work + min(rest, self._work)

    def strike(self, strike: Strike) -> None:
        """Lose what is not saved, and begin again."""
        at, job = strike.at, self._of.job
        if at < self._whole and strike.node in self._lost:
            return  # it is lost already
        self._base += max(0.0, (at - self._up - self._safe) // self._period) * self._work
        if strike.node < 0:
            self._up = max(self._up, at + job.restart)
            return
        if at >= self._whole:
            self._lost.clear()
        self._lost.add(strike.node)
        lost_of_a_set = Counter(self._set_of[node] for node in self._lost)
        if max(lost_of_a_set.values()) > self._most:
            self.from_disk += 1
            self._base = self._base // job.drain * job.drain
            self._lost.clear()
        heapq.heappush(self._spares, at + job.replacement)
        taken = max(at, heapq.heappop(self._spares))
        self._whole = at + self._repair
        self._up = max(self._up, taken + self._repair + job.restart)
