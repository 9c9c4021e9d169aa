"""Background work during training: its priority, and a cap on its bandwidth.

SMPs, encoders and drains run on the nodes that train; nothing here makes training wait.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

NICENESS = 10

IDLE_CLASS = 3
"""IOPRIO_CLASS_IDLE of ioprio_set(2): the disk serves others first."""

_CLASS_SHIFT = 13
_WHO_PROCESS = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def started_low(command: Sequence[str]) -> list[str]:
    """The command with the CPU priority of background work from its first instruction.

    Python and what it imports take longer than many a drain; nice(1) is there before both.
    """
    return ["nice", "-n", str(NICENESS), *command]


def lower_priority() -> None:
    """Lower this thread's CPU and I/O priority, and that of all that it will start.

    Called before threads exist it is the process's.  What cannot be lowered stays as it is,
    and so does a priority that is lower already.
    """
    with suppress(OSError):
        lower = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, 0, lower)
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        # A scheduler that knows no classes ignores it, and nothing depends on it.
        ctypes.CDLL(None).syscall(call, _WHO_PROCESS, 0, IDLE_CLASS << _CLASS_SHIFT)


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
        """Count ``length`` more bytes moved, and wait until the cap allows them."""
        if not self._rate:
            return
        with self._lock:
            self._bytes += length
            due = self._start + self._bytes / self._rate
        wait = due - self._clock()
        if wait > 0:
            self._sleep(wait)
