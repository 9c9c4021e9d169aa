"""Keeps the interval between snapshots within its budget while the job runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.schedule import IntervalGovernor, Schedule, mean_time_between_failures

WORTH_SAYING = 1.25
"""An interval is told of when it has changed by so many times since the last time."""


class Pacing:
    """One governor for all incarnations of a job; it governs schedules whose interval is not
    fixed."""

    def __init__(
        self,
        budget: float,
        expected_mtbf: float,
        observers: Observers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``budget`` is the share of training time that snapshots may take; MTBF in seconds."""
        self._expected_mtbf = expected_mtbf
        self._governor = IntervalGovernor(budget)
        self._observers, self._clock = observers, clock
        self._since = clock()
        self._failures = 0
        self._schedule: Schedule | None = None
        self._told = 0

    def begin(self, interval: int, first: int) -> Schedule:
        """The schedule of an incarnation that starts from iteration ``first``.

        Without an ``interval`` (0) it has what is known from earlier incarnations.
        """
        governed = interval or self._governor.iterations
        self._schedule = Schedule(governed, first, fixed=interval > 0)
        return self._schedule

    def failed(self) -> None:
        """The job has failed and starts again."""
        self._failures += 1

    def hear(self, event: m.NodeEvent) -> None:
        """A listener of the coordinator: takes what captures have cost."""
        body, schedule = event.body, self._schedule
        if schedule is None or schedule.fixed or not isinstance(body, m.CaptureCost):
            return
        cost = body.stall_seconds + body.shadow_seconds
        running = self._clock() - self._since
        mtbf = mean_time_between_failures(self._expected_mtbf, running, self._failures)
        self._governor.hear(body.snapshot, cost, body.iteration_seconds, mtbf)
        schedule.interval = self._governor.iterations
        self._tell(mtbf)

    def _tell(self, mtbf: float) -> None:
        now = self._governor.iterations
        if self._told and max(now, self._told) < WORTH_SAYING * min(now, self._told):
            return
        self._told = now
        text = (
            f"a snapshot every {now} iterations: {self._governor.overhead:.2%} of training time, "
            f"{mtbf / 3600:.3g} h between failures"
        )
        self._observers.tell("interval", text, iterations=now, overhead=self._governor.overhead)
