"""The way to continue after a loss without a spare: as set, or the one expected to cost least.

The figures are collected here, the times of the job's own recoveries, holds and queues from its
events; what follows from them is pure (recovery_cost.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_ft.core.errors import UntrustedFileError
from megatron_ft.core.identity import CHEAPEST, HOLD, SHRINK, STOP
from megatron_ft.launchers.launcher import ReturningHosts
from megatron_ft.launchers.slurm.allocation import ReplacementHosts
from megatron_ft.supervisor import recovery_cost as cost
from megatron_ft.supervisor.elastic import nodes_left
from megatron_ft.supervisor.event_log import EVENTS, LoggedEvent, read_events
from megatron_ft.supervisor.events import EndedEvent, TrainingEvent
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.ledger import SUPERVISING, timeline
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy

log = logging.getLogger(__name__)

HORIZON_SECONDS = 86400.0
"""Time that a job without a time limit is taken to have left."""


class NoSparePolicy:
    """Chooses ``way``, one of SHRINK, HOLD and STOP; a batch script may requeue a job that stops.

    ``hosts`` is where replacements come from.  ``in_vain`` says that none has come in a hold
    after which training has not continued yet.
    """

    def __init__(
        self,
        job: JobContext,
        quarantine: QuarantinePolicy,
        hosts: ReplacementHosts | ReturningHosts | None,
    ) -> None:
        self.way, self.in_vain = STOP, False
        self._spec, self._state, self._members = job.spec, job.state, job.members
        self._fleet, self._standing = job.fleet, job.standing
        self._quarantine, self._hosts = quarantine, hosts
        self._unasked, self._began = isinstance(hosts, ReturningHosts), time.monotonic()

    def recovered(self) -> None:
        """Note that the job has what it needs to train."""
        self.in_vain = False

    def again(self) -> bool:
        """Note that no host has come; True if another way is to be chosen then."""
        self.in_vain = self.way == HOLD
        return self.in_vain and self._spec.settings.on_no_spare == CHEAPEST

    async def decide(self, lack: NoSpareError) -> None:
        """Choose; where the user has not, an event has all ways and their figures."""
        self.way = self._spec.settings.on_no_spare
        if self.way != CHEAPEST:
            return
        times = MeasuredTimes(await asyncio.to_thread(self._events), self._unasked)
        estimates = self._estimates(times, await self._left())
        figures = await self._figures(lack, estimates)
        ways = cost.alternatives(figures)
        best = cost.cheapest(ways)
        self.way = best.way if best is not None and best.way in (SHRINK, HOLD) else STOP
        self._fleet.observers.emit(
            "decided",
            describe(ways, figures.fewer, estimates),
            way=None if best is None else best.way,
            alternatives={w.way: round(w.node_seconds, 1) for w in ways if not w.why_not},
            impossible={w.way: w.why_not for w in ways if w.why_not},
            figures={name: one._asdict() for name, one in estimates.items()},
        )

    def _events(self) -> Sequence[LoggedEvent]:
        """The recorded events; an unreadable file costs measured times, never a recovery."""
        try:
            return read_events(self._state.folder / EVENTS).events
        except (OSError, UntrustedFileError) as error:
            log.warning("defaults count instead of measured times: %s", error)
            return ()

    async def _left(self) -> Estimate:
        """Time until the job's end: as Slurm says now, unless the user has set a limit."""
        limit = self._spec.time_limit_seconds
        if isinstance(self._hosts, ReplacementHosts) and not self._spec.settings.time_limit_seconds:
            now = await asyncio.to_thread(self._hosts.seconds_left)
            if now:
                return Estimate(now, "Slurm")
        left = Estimate(max(0.0, self._began + limit - time.monotonic()), "time limit")
        return left if limit else Estimate(HORIZON_SECONDS, "default")

    def _estimates(self, times: MeasuredTimes, left: Estimate) -> dict[str, Estimate]:
        settings = self._spec.settings
        names = (cost.SPARE, SHRINK, cost.GROW, cost.START, cost.DRAIN)
        found = {name: times.estimate(name) for name in names}
        found[cost.HOST] = times.estimate(cost.HOST, settings.host_seconds)
        found[cost.QUEUE] = times.estimate(cost.QUEUE, settings.queue_seconds)
        found[cost.LEFT] = left
        return found if settings.drain_dir else {**found, cost.DRAIN: Estimate(0.0, "none")}

    async def _figures(self, lack: NoSpareError, estimates: Mapping[str, Estimate]) -> cost.Figures:
        settings, hosts, seats = self._spec.settings, self._hosts, self._members.seats
        fewer, why_not = nodes_left(seats, self._state.record.rank_rule, lack.admitted)
        lost = len(seats.lost(lack.admitted))
        saved, drains = await self._quarantine.newest_saved(), settings.drain_dir is not None
        refused = {
            SHRINK: "" if fewer else "; ".join(why_not) or "no node is left",
            HOLD: "no host comes here" if hosts is None else "none came" * self.in_vain,
            cost.REQUEUE: "" if drains or saved >= 0 else "nothing of it is on disk",
        }
        if not settings.queue_seconds:
            refused[cost.REQUEUE] = "nothing starts it again"
        committed = self._standing.committed
        again = 0 if drains or committed is None else max(0, committed.iteration - saved)
        return cost.Figures(
            nodes=len(seats.active),
            lost=lost,
            spares=lost - lack.missing,
            fewer=len(fewer),
            seconds={name: one.seconds for name, one in estimates.items()},
            grows=settings.grow != "off" and self._unasked,
            hold_limit=0.0 if hosts is None else hosts.seconds,
            redone=again * self._fleet.heartbeats.iteration_seconds,
            refused=refused,
        )


def describe(ways: list[cost.Alternative], fewer: int, estimates: Mapping[str, Estimate]) -> str:
    """The decision as a sentence: the way, the others with their figures, and defaults.  Pure."""
    doing = {SHRINK: f"continuing on {fewer} nodes", HOLD: "holding", cost.REQUEUE: "requeueing"}
    best = cost.cheapest(ways)
    others = ", ".join(
        f"not {doing[way]}: {why_not}" if why_not else f"{doing[way]} {lost:,.0f}"
        for way, lost, why_not in ways
        if way in doing and (best is None or way != best.way)
    )
    chosen = "stopping ("
    if best is not None:
        chosen = f"{doing[best.way]} (about {best.node_seconds:,.0f} node-seconds; "
    guessed = [
        f"{name} {seconds:,.0f} s"
        for name, (seconds, source) in estimates.items()
        if seconds and "default" in source
    ]
    by_default = f"; by default: {', '.join(guessed)}" if guessed else ""
    return f"no spare is left: {chosen}{others}){by_default}"


RESTARTS = (cost.IN_PLACE, cost.SPARE, SHRINK, cost.GROW)
DEFAULTS = {
    **dict.fromkeys((*RESTARTS, cost.START, cost.DRAIN), 60.0),
    cost.HOST: 1800.0,
    cost.QUEUE: 0.0,
}
"""Seconds where a job has measured none, and nobody has given any."""

_TAKES = {"spare": cost.SPARE, "shrunk": SHRINK, "grown": cost.GROW}
_ENDS_DRAIN = ("holding", "hold_refused", "salvage_failed", "stopped")


class Estimate(NamedTuple):
    """Expected seconds, and where they come from."""

    seconds: float
    source: str


class MeasuredTimes:
    """Seconds of each thing that a job did; ``in_vain`` are those in which no host came.

    Where hosts come ``unasked``, a job that has shrunk waits for them, too.
    """

    def __init__(self, events: Iterable[LoggedEvent], unasked: bool = True) -> None:
        self._unasked = unasked
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.in_vain = 0.0
        self._since: dict[str, float] = {}
        self._took, self._apart, self._lost, at = "", 0.0, False, 0.0
        for at, event in timeline(events):
            self._take(at, event)
        self._no_host(SHRINK, at)

    def estimate(self, name: str, given: float = 0.0) -> Estimate:
        """The mean of what was measured; what was ``given``, if not 0, counts as one of these.

        For a restart of a kind that never was, that of others, or the job's start.  Time in
        which no host came counts as that of an exponential law does: it has no end yet.
        """
        found, source = self.spent[name], f"{len(self.spent[name])} measured"
        if given:
            found, source = [given, *found], f"given, {source}"
        elif not found and name in RESTARTS:
            others = [seconds for other in RESTARTS for seconds in self.spent[other]]
            found, source = others or self.spent[cost.START], "other starts"
        if not found:
            found, source = [DEFAULTS[name]], "default"
        in_vain = self.in_vain if name == cost.HOST else 0.0
        source += f", {in_vain:.0f} s in vain" if in_vain else ""
        return Estimate((sum(found) + in_vain) / len(found), source)

    def _take(self, at: float, event: LoggedEvent) -> None:
        since, kind = self._since, event.kind
        self._took = _TAKES.get(kind, self._took)
        if kind in _ENDS_DRAIN:
            self._end(cost.DRAIN, at)
        if kind == SUPERVISING:
            self._end(cost.QUEUE, at)
            self._since, self._apart = {cost.START: at}, 0.0
        elif isinstance(event.facts, EndedEvent):
            since.setdefault("down", at - event.facts.ago)
            self._apart += self._end(HOLD, at, cost.HOST)
        elif isinstance(event.facts, TrainingEvent):
            self._trains(at)
        elif kind in ("stopped", "hold_timed_out", "held_in_vain"):  # the older name
            self._apart += self._no_host(HOLD, at)
            since |= {cost.QUEUE: at} if kind == "stopped" else {}
        elif kind in ("holding", "salvaging"):
            since[HOLD if kind == "holding" else cost.DRAIN] = at
        elif kind == "shrunk" and self._lost and self._unasked:
            since.setdefault(SHRINK, at)
        elif kind == "grown":
            self._end(SHRINK, at, cost.HOST)
        self._lost |= kind == "node_lost"

    def _trains(self, at: float) -> None:
        down = self._since.pop("down", at) + self._apart
        if not self._end(cost.START, at):
            self.spent[self._took or cost.IN_PLACE].append(max(0.0, at - down))
        self._took, self._apart, self._lost = "", 0.0, False

    def _end(self, name: str, at: float, as_name: str = "") -> float:
        """Note that something has ended, if it had begun; how long it took."""
        if name not in self._since:
            return 0.0
        seconds = at - self._since.pop(name)
        self.spent[as_name or name].append(seconds)
        self._apart += seconds if name == cost.DRAIN else 0.0
        return seconds

    def _no_host(self, name: str, at: float) -> float:
        seconds = at - self._since.pop(name, at)
        self.in_vain += seconds
        return seconds
