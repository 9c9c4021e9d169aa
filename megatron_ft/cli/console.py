"""The console of ``megatron-ft run``: one line an event, and bounded in a job of months."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_ft.supervisor.event_log import EVENTS
from megatron_ft.supervisor.events import (
    AbortedEvent,
    CaughtUpEvent,
    CommittedEvent,
    DroppedEvent,
    EndedEvent,
    JobEvent,
    StoppedEvent,
)
from megatron_ft.supervisor.ledger import SUPERVISING

QUIET = (DroppedEvent.kind, SUPERVISING, EndedEvent.kind, CaughtUpEvent.kind, StoppedEvent.kind)
"""Kinds whose content other lines have."""

FOLDED = frozenset(
    (
        f"{AbortedEvent.kind} corrupt drain_failed held interval pressure pressure_over refused "
        "released scheduler_away straggler world_broken world_ended world_refused"
    ).split()
)
"""Kinds that one cause can repeat for hours."""

MOST_LINES, WINDOW_SECONDS = 5, 60.0
"""Lines of a folded kind in a window; the others are counted."""


class Console:
    """Prints events with ``say``.

    Of the commits of each level it prints the first and every tenth after it; after 100 every
    hundredth, and after 1,000 every thousandth.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._start = say, time.monotonic()
        self._commits: dict[str, int] = {}
        self._windows: dict[str, tuple[float, int]] = {}

    def on_event(self, event: JobEvent) -> None:
        """Print the event if it is worth a line."""
        now = event.monotonic - self._start
        self._count_folded(now)
        if event.kind not in QUIET and self._is_due(event) and self._has_room(event.kind, now):
            self._say(f"[{now:7.1f} s] {event.text}")

    def _is_due(self, event: JobEvent) -> bool:
        if not isinstance(event.facts, CommittedEvent):
            return True
        level = event.facts.level
        self._commits[level] = count = self._commits.get(level, 0) + 1
        step = 10 if count <= 100 else 100 if count <= 1000 else 1000
        return count % step == 1

    def _has_room(self, kind: str, now: float) -> bool:
        if kind not in FOLDED:
            return True
        since, count = self._windows.get(kind, (now, 0))
        self._windows[kind] = since, count + 1
        return count < MOST_LINES

    def _count_folded(self, now: float) -> None:
        """Close the windows that are over, and say how many lines each has left out."""
        for kind, (since, count) in list(self._windows.items()):
            if now - since >= WINDOW_SECONDS:
                del self._windows[kind]
                if (more := count - MOST_LINES) > 0:
                    text = f"{more} more events like this ({kind}) in {now - since:.0f} s"
                    self._say(f"[{now:7.1f} s] {text}: {EVENTS} has them")
