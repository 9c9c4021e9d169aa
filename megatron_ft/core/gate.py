"""Where background traffic waits while a trainer of its node is in a quiet window."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_ft.core.word import QuietWord

STEP_SECONDS = 0.001
"""How long a window may be over before traffic goes on, and how often a waiting process wakes."""

MOST_HELD_SECONDS = 60.0
"""Most that all windows together hold one encode or drain: protection comes late, never not."""


class QuietGate:
    """For one encode or drain; threads may share it."""

    def __init__(
        self,
        word: QuietWord | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Without a word nothing ever waits."""
        self._word, self._clock, self._sleep = word, clock, sleep
        self.held_seconds = 0.0

    def wait(self) -> None:
        """Return when no window is open, or this one was held for long enough."""
        if self._word is None:
            return
        started, before = self._clock(), self.held_seconds
        while (left := self._word.remaining(self._clock())) > 0:
            if before + self._clock() - started >= MOST_HELD_SECONDS:
                break
            self._sleep(min(left, STEP_SECONDS))
        self.held_seconds = before + self._clock() - started
