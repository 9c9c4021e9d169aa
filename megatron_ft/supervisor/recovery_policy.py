"""The way to continue after a loss without a spare: as set, or the one expected to cost least.

The figures are collected here; what follows from them is pure (recovery_cost.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from megatron_ft.core.identity import CHEAPEST, HOLD, SHRINK, STOP
from megatron_ft.launchers.returning import ReturningHosts
from megatron_ft.launchers.slurm.allocation import ReplacementHosts
from megatron_ft.supervisor import recovery_cost as cost
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.elastic import nodes_left
from megatron_ft.supervisor.event_log import EVENTS, read_events
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership, NoSpareError
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy
from megatron_ft.supervisor.recovery_times import Estimate, MeasuredTimes
from megatron_ft.supervisor.spec import JobSpec

HORIZON_SECONDS = 86400.0
"""Time that a job without a time limit is taken to have left."""


class NoSparePolicy:
    """Chooses ``way``, one of SHRINK, HOLD and STOP; a batch script may requeue a job that stops.

    ``hosts`` is where replacements come from.  ``in_vain`` says that none has come in a hold
    after which training has not continued yet.
    """

    def __init__(
        self,
        spec: JobSpec,
        state: JobState,
        members: Membership,
        coordinator: Coordinator,
        quarantine: QuarantinePolicy,
        hosts: ReplacementHosts | ReturningHosts | None,
    ) -> None:
        self.way, self.in_vain = STOP, False
        self._spec, self._state, self._members = spec, state, members
        self._coordinator, self._quarantine, self._hosts = coordinator, quarantine, hosts
        self._unasked, self._began = isinstance(hosts, ReturningHosts), time.monotonic()

    def again(self) -> bool:
        """Note that no host has come; whether another way is to be chosen then."""
        self.in_vain = self.way == HOLD
        return self.in_vain and self._spec.settings.on_no_spare == CHEAPEST

    async def decide(self, lack: NoSpareError) -> None:
        """Choose; where the user has not, an event has all ways and their figures."""
        self.way = self._spec.settings.on_no_spare
        if self.way != CHEAPEST:
            return
        events = await asyncio.to_thread(read_events, self._state.folder / EVENTS)
        estimates = self._estimates(MeasuredTimes(events.events, self._unasked))
        figures = await self._figures(lack, estimates)
        ways = cost.alternatives(figures)
        best = cost.cheapest(ways)
        self.way = best.way if best is not None and best.way in (SHRINK, HOLD) else STOP
        self._coordinator.observers.emit(
            "decided",
            describe(ways, figures.fewer, estimates),
            way=None if best is None else best.way,
            alternatives={w.way: round(w.node_seconds, 1) for w in ways if not w.why_not},
            impossible={w.way: w.why_not for w in ways if w.why_not},
            figures={name: one._asdict() for name, one in estimates.items()},
        )

    def _estimates(self, times: MeasuredTimes) -> dict[str, Estimate]:
        settings, limit = self._spec.settings, self._spec.time_limit_seconds
        left = Estimate(max(0.0, self._began + limit - time.monotonic()), "time limit")
        names = (cost.SPARE, SHRINK, cost.GROW, cost.START, cost.DRAIN)
        found = {name: times.estimate(name) for name in names}
        found[cost.HOST] = times.estimate(cost.HOST, settings.host_seconds)
        found[cost.QUEUE] = times.estimate(cost.QUEUE, settings.queue_seconds)
        found[cost.LEFT] = left if limit else Estimate(HORIZON_SECONDS, "default")
        return found if settings.drain_dir else {**found, cost.DRAIN: Estimate(0.0, "none")}

    async def _figures(self, lack: NoSpareError, estimates: Mapping[str, Estimate]) -> cost.Figures:
        settings, hosts = self._spec.settings, self._hosts
        fewer, why_not = nodes_left(self._spec, self._state, self._members, lack.admitted)
        lost = len(self._members.lost(lack.admitted))
        saved, drains = await self._quarantine.newest_saved(), settings.drain_dir is not None
        refused = {
            SHRINK: "" if fewer else "; ".join(why_not) or "no node is left",
            HOLD: "no host comes here" if hosts is None else "none came" * self.in_vain,
            cost.REQUEUE: "" if drains or saved >= 0 else "nothing of it is on disk",
        }
        if not settings.queue_seconds:
            refused[cost.REQUEUE] = "nothing starts it again"
        committed = self._coordinator.committed
        again = 0 if drains or committed is None else max(0, committed[1] - saved)
        return cost.Figures(
            nodes=len(self._members.active),
            lost=lost,
            spares=lost - lack.missing,
            fewer=len(fewer),
            seconds={name: one.seconds for name, one in estimates.items()},
            grows=settings.grow != "off" and self._unasked,
            hold_limit=0.0 if hosts is None else hosts.seconds,
            redone=again * self._coordinator.watched.get("iteration_seconds", 0.0),
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
