"""The iterations of which snapshots are taken, and how many lie between two of them.

A snapshot that costs C seconds of training, taken every T seconds in a job that fails every M
seconds, takes C/T of all time, and each failure loses T/2 of work.  The sum C/T + T/(2M) is
least at T = sqrt(2 C M) (Young, 1974, doi:10.1145/361147.361115).  The overhead budget
bounds T from below: C/T must not exceed it, whatever would be best.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import CommittedEvent, JobEvent, Observers
from megatron_ft.supervisor.pressure import Debt


class Numbering:
    """Learns by how much the numbers that trainers give to ``save`` rise from call to call.

    ``stride`` is that: 1, the iterations between two calls, or the tokens of an iteration.  Where
    numbers rise by different amounts (``irregular``) it is their greatest common divisor.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride, self.irregular = stride, False
        self._last: tuple[int, int] | None = None
        self._step = 0

    def heard(self, done: int, iteration: int) -> str:
        """Take that ``done`` iterations have ended, the last as number ``iteration``.

        Returns what people should know of it, once for each change.
        """
        last, self._last = self._last, (done, iteration)
        if last is None or done <= last[0] or iteration <= last[1]:
            return ""
        before = (self.stride, self.irregular)
        step, rest = divmod(iteration - last[1], done - last[0])
        self.irregular = bool(rest) or self._step not in (0, step)
        self._step = 0 if rest else step
        self.stride = math.gcd(self.stride, iteration - last[1]) if self.irregular else step
        if before == (self.stride, self.irregular):
            return ""
        if self.irregular:
            return (
                "the numbers that the script gives to save() rise by different amounts: snapshots "
                "are taken where a number can be foreseen; let them rise by one"
            )
        return f"the numbers that the script gives to save() rise by {self.stride}"


class Schedule:
    """Chooses the iteration of each snapshot, and learns how far ahead to permit it.

    Snapshots are of multiples of ``interval``; if it is not ``fixed``, of so many iterations after
    the last.  It may be changed at any time.  ``first`` is the iteration that training starts
    from, 0 or the restored one.  Where the numbers of iterations do not rise by 1 (``numbering``),
    a snapshot is of the first one at or behind these that training passes.

    ``lead`` is how many iterations ahead of the fastest known trainer a permit is given; it grows
    when a permit came too late and shrinks again after ``CALM`` commits in a row.  Where every
    iteration is wanted it may be 0: the permit is then for the iteration under way, which is in
    time where iterations are longer than its journey.

    ``debt`` holds snapshots back that have made too many iterations late.
    """

    MOST_LEAD = 64
    CALM = 16

    def __init__(
        self, interval: int, first: int = 0, *, fixed: bool = True, stride: int = 1
    ) -> None:
        self.interval, self.fixed, self.first = interval, fixed, first
        self.numbering = Numbering(stride)
        self.lead, self.debt = self._least_lead(), Debt()
        self._before = self._spent = self._reached = first
        self._refused = -1
        self._commits_in_a_row = 0

    def next_iteration(self, progress: int, ahead: int | None = None) -> int:
        """The iteration of the next snapshot; it lies more than ``lead`` ahead of ``progress``.

        That is the highest iteration that any trainer has finished, -1 if none has yet.  With
        ``ahead`` the interval does not count: so many iterations after the soonest one.
        """
        passed, stride = self.first if progress < 0 else progress, self.numbering.stride
        soonest = passed + (self.lead + 1) * stride
        if ahead is not None:
            return soonest + ahead * stride
        wanted = max(soonest, self._spent + self.interval * stride)
        if self.fixed:
            wanted = -(-soonest // self.interval) * self.interval
        return passed - (passed - wanted) // stride * stride

    @property
    def spacing(self) -> int:
        """By how much the numbers of two snapshots differ at their interval."""
        stride = self.numbering.stride
        return -(-self.interval // stride) * stride if self.fixed else self.interval * stride

    def heard(self, done: int, iteration: int) -> str:
        """Take what a trainer reports, and return what people should know, as Numbering does."""
        before = self.numbering.stride
        text = self.numbering.heard(done, iteration)
        if self.numbering.stride != before:
            # Permits were missed for another reason than that they came late.
            self.lead = self._least_lead()
        return text

    def reached(self, progress: int) -> None:
        """Note that training has come to ``progress``, as for ``next_iteration``.

        Progress falls when a script loads an older checkpoint in the middle of training: then
        snapshots of later iterations delay no other any more.
        """
        if 0 <= progress < self._reached:
            self._before = self._spent = self._refused = progress
            self.debt = Debt()
        self._reached = max(progress, 0)

    def permitted(self, iteration: int) -> None:
        """Note a permit for ``iteration``: the next snapshot counts from there."""
        self._before, self._spent = self._spent, iteration

    def refused(self) -> None:
        """Wait for the iteration of a refused permit: a node cannot take snapshots for now."""
        self._refused = self._spent

    def waits(self, progress: int, *, urgent: bool = False) -> bool:
        """True until training reaches the iteration of a refused permit, or its debt is paid.

        What is ``urgent`` waits for no debt.
        """
        return progress < self._refused or (not urgent and max(progress, 0) < self.debt.until)

    def missed(self) -> None:
        """Note that the permit came too late for some rank.

        The next try comes soon: a snapshot that some rank has missed costs the others little.
        """
        self.lead = min(self.lead + 1, self.MOST_LEAD)
        self._commits_in_a_row = 0
        self._spent = self._before

    def committed(self) -> None:
        """Note a commit: the permit was in time for every rank."""
        self._commits_in_a_row += 1
        if self._commits_in_a_row % self.CALM == 0:
            self.lead = max(self._least_lead(), self.lead - 1)

    def _least_lead(self) -> int:
        return 0 if self.interval == 1 else 1


class Skips:
    """``total`` counts over the whole job, without those of the present period of skipping.

    These are ``now``, as of the last ``begin``.  Progress is the fastest trainer's iteration.
    """

    def __init__(self) -> None:
        self.total = self.now = 0
        self._since: int | None = None

    def begin(self, progress: int, interval: int) -> bool:
        """A snapshot could not be permitted.  True if this starts a period of skipping."""
        started = self._since is None
        if self._since is None:
            self._since = progress
        self.now = max(0, progress // interval - self._since // interval)
        return started

    def end(self, progress: int, interval: int) -> int | None:
        """Snapshots are permitted again: how many were due meanwhile, None if none were held."""
        if self._since is None:
            return None
        skipped = max(0, progress // interval - self._since // interval)
        self.total += skipped
        self._since, self.now = None, 0
        return skipped


FIRST_ITERATIONS = 2
"""The interval while nothing is known of the cost."""

FASTEST_GROWTH = 10.0
"""One sample stretches the interval at most so many times: it may have been a hiccup."""

SAMPLES = 5
"""Costs that are remembered: three cheap ones of them make the interval shorter again."""


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

    def record(self, snapshot: SnapshotId, cost: float, iteration: float, mtbf: float) -> None:
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


WORTH_SAYING = 1.25
"""An interval is emitted when it has changed by so many times since the last time."""


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
        self._expected_mtbf, self._governor = expected_mtbf, IntervalGovernor(budget)
        self._observers, self._clock, self._since = observers, clock, clock()
        self._failures = self._emitted = 0
        self._schedule: Schedule | None = None
        self._late = False
        observers.subscribe(self._on_job_event)

    def begin(self, interval: int, first: int) -> Schedule:
        """The schedule of an incarnation that starts from iteration ``first``.

        Without an ``interval`` (0) it has what is known from earlier incarnations.
        """
        governed = interval or self._governor.iterations
        # The script numbers as in its last start; where it does not, that is learned again.
        stride = 1 if self._schedule is None else self._schedule.numbering.stride
        self._schedule = Schedule(governed, first, fixed=interval > 0, stride=stride)
        self._late = False
        return self._schedule

    def failed(self) -> None:
        """Count a failure of the job, which starts again."""
        self._failures += 1

    def on_event(self, event: m.NodeEvent) -> None:
        """A listener of the Fleet: takes what captures have cost, and how late they made
        iterations."""
        body, schedule, governor = event.body, self._schedule, self._governor
        if schedule is not None and isinstance(body, m.Slowed):
            self._wait(schedule, body)
        if schedule is None or schedule.fixed or not isinstance(body, m.CaptureCost):
            return
        cost = body.stall_seconds + body.shadow_seconds
        # What was expected before counts like one failure seen.
        running = self._clock() - self._since
        mtbf = (self._expected_mtbf + running) / (self._failures + 1)
        governor.record(body.snapshot, cost, body.iteration_seconds, mtbf)
        now, before = governor.iterations, self._emitted
        schedule.interval = now
        if not before or max(now, before) >= WORTH_SAYING * min(now, before):
            self._emitted = now
            text = f"a snapshot every {now} iterations: {governor.overhead:.2%} of training time, "
            text += f"{mtbf / 3600:.3g} h between failures"
            self._observers.emit("interval", text, iterations=now, overhead=governor.overhead)

    def _wait(self, schedule: Schedule, slowed: m.Slowed) -> None:
        """Hold snapshots back for iterations that one has made late."""
        debt = schedule.debt
        before = debt.until
        debt.charge(slowed.iteration, slowed.late, schedule.numbering.stride)
        if debt.until > before and (slowed.late or before <= slowed.iteration):
            self._late = self._late or slowed.late > 0
            seen = f"{slowed.late} iterations" if slowed.late else f"iteration {slowed.iteration}"
            judged = "made late" if slowed.late else "may have made late"
            text = f"no snapshot before iteration {debt.until}: the last one {judged} {seen}"
            self._observers.emit("pressure", text, until=debt.until, late=slowed.late)

    def _on_job_event(self, event: JobEvent) -> None:
        if self._late and isinstance(event.facts, CommittedEvent) and self._schedule is not None:
            if event.facts.iteration >= self._schedule.debt.until:
                self._late = False
                self._observers.emit("pressure_over", "snapshots are taken at their interval again")
