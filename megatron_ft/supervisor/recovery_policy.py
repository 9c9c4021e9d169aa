"""What a job does that has lost nodes and has no spare: as set, or what is expected to cost least.

The decision itself is pure (recovery_cost.py); its figures are collected here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from math import isinf

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
from megatron_ft.supervisor.recovery_times import (
    DRAIN,
    GROW,
    HOST,
    QUEUE,
    START,
    Estimate,
    MeasuredTimes,
)
from megatron_ft.supervisor.spec import JobSpec

HORIZON_SECONDS = 86400.0
"""Time that a job without a time limit is taken to have left."""

Estimates = Mapping[str, Estimate]


class NoSparePolicy:
    """Chooses ``way``, one of SHRINK, HOLD and STOP; a batch script may requeue a job that stops.

    ``hosts`` is where replacements come from.
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
        self.way, self._in_vain = STOP, False
        self._spec, self._state, self._members = spec, state, members
        self._coordinator, self._quarantine, self._hosts = coordinator, quarantine, hosts
        limit = spec.time_limit_seconds
        self._ends_at = time.monotonic() + limit if limit else 0.0

    def again(self) -> bool:
        """Note that no host has come; whether another way is to be chosen then."""
        self._in_vain = self.way == HOLD
        return self._in_vain and self._spec.settings.on_no_spare == CHEAPEST

    def restored(self) -> None:
        """Note that training continues: hosts may be waited for again."""
        self._in_vain = False

    async def decide(self, lack: NoSpareError) -> None:
        """Set ``way``; an event has all ways and their figures if it was not the user who did."""
        self.way = self._spec.settings.on_no_spare
        if self.way != CHEAPEST:
            return
        events = await asyncio.to_thread(read_events, self._state.folder / EVENTS)
        estimates = self._estimates(MeasuredTimes(events.events))
        figures = await self._figures(lack, estimates)
        ways = cost.alternatives(figures)
        best = cost.cheapest(ways)
        self._coordinator.observers.emit(
            "decided",
            describe(ways, figures, estimates),
            way=None if best is None else best.way,
            alternatives=[
                {**way._asdict(), "node_seconds": None if isinf(way[1]) else round(way[1], 1)}
                for way in ways
            ],
            figures={name: one._asdict() for name, one in estimates.items()},
        )
        taken = {cost.SHRINK: SHRINK, cost.HOLD: HOLD}
        self.way = STOP if best is None else taken.get(best.way, STOP)

    def _estimates(self, times: MeasuredTimes) -> dict[str, Estimate]:
        """All times that the decision follows from."""
        settings, now = self._spec.settings, time.monotonic()
        names = (cost.SPARE, cost.SHRINK, GROW, START)
        found = {name: times.estimate(name) for name in names}
        found[HOST] = times.host(settings.host_seconds)
        found[QUEUE] = times.queue(settings.queue_seconds)
        if settings.drain_dir is not None:
            found[DRAIN] = times.estimate(DRAIN)
        left = Estimate(self._ends_at - now, "time limit")
        found["left"] = left if self._ends_at else Estimate(HORIZON_SECONDS, "default")
        return found

    async def _figures(self, lack: NoSpareError, estimates: Estimates) -> cost.Figures:
        active, settings, hosts = self._members.active, self._spec.settings, self._hosts
        fewer, why_not = nodes_left(self._spec, self._state, self._members, lack.admitted)
        lost = len(self._members.lost(lack.admitted))
        seconds = {name: one.seconds for name, one in estimates.items()}
        redone, requeue = await self._redone_seconds()
        refused = {
            cost.SHRINK: "" if fewer else "; ".join(why_not) or "no node is left",
            cost.HOLD: "no host comes here" if hosts is None else "none came" * self._in_vain,
            cost.REQUEUE: requeue if settings.queue_seconds else "nothing starts it again",
        }
        return cost.Figures(
            nodes=len(active),
            lost=lost,
            spares=lost - lack.missing,
            fewer=len(fewer),
            restarts={name: seconds[name] for name in (cost.SPARE, cost.SHRINK)},
            grow=seconds[GROW],
            grows=settings.grow != "off" and hosts is not None and hosts.unasked,
            host=seconds[HOST],
            hold_limit=0.0 if hosts is None else hosts.seconds,
            drain=seconds.get(DRAIN, 0.0),
            queue=seconds[QUEUE],
            start=seconds[START],
            redone=redone,
            left=max(0.0, seconds["left"]),
            refused=refused,
        )

    async def _redone_seconds(self) -> tuple[float, str]:
        """Time of the iterations that a later start makes again, and why none would be of use.

        A drain before the job stops leaves none to be made again.
        """
        coordinator = self._coordinator
        if self._spec.settings.drain_dir is not None or coordinator.committed is None:
            return 0.0, ""
        saved = await self._quarantine.newest_saved()
        if saved < 0 and not self._spec.from_scratch:
            return 0.0, "nothing of it is on disk"
        lost = coordinator.committed[1] - max(0, saved)
        return max(0, lost) * coordinator.watched.get("iteration_seconds", 0.0), ""


_DOING = {cost.HOLD: "holding", cost.REQUEUE: "requeueing"}


def describe(ways: list[cost.Alternative], figures: cost.Figures, estimates: Estimates) -> str:
    """The decision as a sentence: the way, the others with their figures, and defaults.  Pure."""
    doing = {**_DOING, cost.SHRINK: f"continuing on {figures.fewer} nodes"}
    best = cost.cheapest(ways)
    others = [way for way in ways if way.way not in (cost.IN_PLACE, cost.SPARE) and way != best]
    told = [
        f"{doing[way.way]} {way.node_seconds:,.0f}"
        if not way.why_not
        else f"no {_DOING.get(way.way, 'continuing')}: {way.why_not}"
        for way in others
    ]
    start = "stopping (" if best is None else f"{doing[best.way]} ("
    start += "" if best is None else f"about {best.node_seconds:,.0f} node-seconds; "
    guessed = [f"{n} {e.seconds:,.0f} s" for n, e in estimates.items() if e.source == "default"]
    text = f"no spare is left: {start}{', '.join(told)})"
    return f"{text}; by default: {', '.join(guessed)}" if guessed else text
