"""Summary of a job for ``megatron-ft status``, which the supervisor writes to its state folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.snapshots import SnapshotPump

log = logging.getLogger(__name__)

Report = Mapping[str, Any]


class JobSummary:
    """One JSON object, made anew by each call of ``view``; ``reports`` add members to it."""

    def __init__(self, pump: SnapshotPump, *reports: Callable[[], Report]) -> None:
        self._pump, self._reports = pump, reports
        self._subscribers: list[Callable[[Report], None]] = []
        self._late_ranks = ""
        pump.fleet.observers.subscribe(self._note_late_ranks)

    def subscribe(self, subscriber: Callable[[Report], None]) -> None:
        """Have ``subscriber`` get each summary that is published."""
        self._subscribers.append(subscriber)

    def publish(self) -> Report:
        """Make the summary and pass it on; a subscriber that fails stops nobody."""
        view = self.view()
        for subscriber in self._subscribers:
            try:
                subscriber(view)
            except Exception as error:
                log.error("%r failed on the job's summary: %r", subscriber, error)
        return view

    def view(self) -> dict[str, Any]:
        """The job as its supervisor sees it now."""
        of, fleet, cycle = self._pump, self._pump.fleet, self._pump.cycle
        stripe_map = None if cycle is None else cycle.stripe_map
        exposure = {} if stripe_map is None else of.standing.exposure(stripe_map).report
        idle = set() if cycle is None else fleet.links.keys() - cycle.nodes
        view = {
            "incarnation": fleet.incarnation,
            "encoders": "up" if of.encoders.usable else "down",
            "paused": of.paused,
            "held": of.pinned,
            "skipping_for": self._skipping_for(),
            "waits_until": self._waits_until(),
            "skipped": of.skips.total + of.skips.now,
            "unregistered": self._late_ranks,
            "given_up": of.given_up[0],
            "given_up_reason": of.given_up[1],
            "moves": fleet.evacuations.moves,
            "nodes": sorted(fleet.links),
            "idle": sorted(idle),
            "iteration": max(fleet.progress.values(), default=-1),
            "interval": 0 if cycle is None else cycle.schedule.spacing,
            **of.standing.report(stripe_map),
            **exposure,
        }
        for report in self._reports:
            view |= report()
        return view

    def _skipping_for(self) -> str:
        of = self._pump
        if of.renewing:
            return "larger arenas are made"
        if of.unmade:
            return "the memory of a slot is made"
        if of.pinned:
            return "a reader holds one"
        return "no encoder is running" if of.crowded else ""

    def _waits_until(self) -> int | None:
        """The iteration up to which snapshots wait because they make iterations late."""
        cycle = self._pump.cycle
        until = 0 if cycle is None else cycle.schedule.debt.until
        passed = cycle is None or max(self._pump.fastest(cycle), 0) >= until
        return None if passed else until

    def _note_late_ranks(self, event: JobEvent) -> None:
        """Keep what was said of ranks that do not register, until all have."""
        if event.kind == "unregistered":
            self._late_ranks = event.text
        elif event.kind in ("training", "trainers_started"):
            self._late_ranks = ""
