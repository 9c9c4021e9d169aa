"""Telling a peer's silence from one's own sleep.

A process that was suspended (SIGSTOP, a paused machine, an event loop that was held) has
heard of nobody meanwhile, and that says nothing about the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

_MISSED_BEATS = 8
"""A busy machine misses a few; a gap that is shorter counts as time in which one listened."""

_REMEMBERED = 256


class Awake:
    """How long this process has been awake since some time, on the monotonic clock."""

    def __init__(self, beat_seconds: float) -> None:
        """``watch`` looks every ``beat_seconds``; a sleep is a gap of several of them."""
        self._beat = beat_seconds
        self._seen = time.monotonic()
        self._sleeps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    async def watch(self) -> None:
        """Note every beat that this process is awake; runs until cancelled."""
        while True:
            self._look(time.monotonic())
            await asyncio.sleep(self._beat)

    def seconds(self, since: float, now: float) -> float:
        """Seconds from ``since`` to ``now``, less those of sleeps that ended between them.

        A sleep that has just ended counts as one, also before ``watch`` runs again.
        """
        self._look(now)
        slept = sum(end - max(begin, since) for begin, end in self._sleeps if end > since)
        return now - since - slept

    def _look(self, now: float) -> None:
        if now - self._seen > _MISSED_BEATS * self._beat:
            self._sleeps.append((self._seen, now))
        self._seen = max(self._seen, now)
