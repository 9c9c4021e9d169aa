"""Summary of a job for ``megatron-ft status``, which the supervisor writes to its state folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.events import JobEvent


class JobSummary:
    """One JSON object, made anew by each call of ``view``; ``reports`` add members to it."""

    def __init__(self, coordinator: Coordinator, *reports: Callable[[], Mapping[str, Any]]) -> None:
        self._coordinator, self._reports = coordinator, reports
        self._late_ranks = ""
        coordinator.observers.subscribe(self._note_late_ranks)

    def view(self) -> dict[str, Any]:
        """The job as its supervisor sees it now."""
        of, cycle = self._coordinator, self._coordinator.cycle
        stripe_map = None if cycle is None else cycle.stripe_map
        exposure = {} if stripe_map is None else of.standing.exposure(stripe_map).report
        idle = set() if cycle is None else of.links.keys() - cycle.nodes
        view = {
            "incarnation": of.incarnation,
            "encoders": "up" if of.encoders.usable else "down",
            "paused": of.paused,
            "held": of.pinned,
            "skipping_for": self._skipping_for(),
            "waits_until": self._waits_until(),
            "skipped": of.skips.total + of.skips.now,
            "unregistered": self._late_ranks,
            "given_up": of.given_up[0],
            "given_up_reason": of.given_up[1],
            "moves": of.moves,
            "nodes": sorted(of.links),
            "idle": sorted(idle),
            "iteration": max(of.progress.values(), default=-1),
            **of.standing.report(stripe_map),
            **exposure,
        }
        for report in self._reports:
            view |= report()
        return view

    def _skipping_for(self) -> str:
        of = self._coordinator
        if of.renewing:
            return "larger arenas"
        if of.unmade:
            return "memory to be made"
        return "a reader" if of.pinned else "want of encoders" if of.crowded else ""

    def _waits_until(self) -> int | None:
        """The iteration up to which snapshots wait because they make iterations late."""
        cycle = self._coordinator.cycle
        until = 0 if cycle is None else cycle.schedule.debt.until
        passed = cycle is None or max(self._coordinator.fastest(cycle), 0) >= until
        return None if passed else until

    def _note_late_ranks(self, event: JobEvent) -> None:
        """Keep what was said of ranks that do not register, until all have."""
        if event.kind == "unregistered":
            self._late_ranks = event.text
        elif event.kind in ("training", "trainers_started"):
            self._late_ranks = ""
