"""A cap on bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Keeps the average rate since the start at or below ``bytes_per_second``, 0 for no cap.

    Threads may share one.
    """

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep
        self._start, self._bytes = clock(), 0
        self._lock = threading.Lock()

    def after(self, length: int) -> None:
        """``length`` more bytes were moved: wait until that many were allowed."""
        if not self._rate:
            return
        with self._lock:
            self._bytes += length
            due = self._start + self._bytes / self._rate
        wait = due - self._clock()
        if wait > 0:
            self._sleep(wait)
