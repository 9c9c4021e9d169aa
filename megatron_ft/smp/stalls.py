"""Readers that do not get on: a disk that hangs, or a process that is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

STALL_SECONDS = 120.0
"""A reader that has not run for so long holds no slot any more.

One that is merely slow, or capped, runs between any two of its pieces.
"""


def switches(pid: int) -> int:
    """How often the process's main thread was put to sleep or replaced; -1 if it is gone.

    A thread that waits in one system call, or is stopped, stays at its number.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return -1
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])


class Stalls:
    """Looks at readers from time to time; ``count`` is what changes while a process runs."""

    def __init__(
        self, seconds: float = STALL_SECONDS, count: Callable[[int], int] = switches
    ) -> None:
        self._seconds, self._count = seconds, count
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, readers: Mapping[str, int], now: float | None = None) -> list[str]:
        """Those of ``readers``, by name with their pids, that stall; each is named once."""
        now = time.monotonic() if now is None else now
        self._seen = {name: seen for name, seen in self._seen.items() if name in readers}
        stalled = []
        for name, pid in readers.items():
            count = self._count(pid)
            known, since = self._seen.get(name, (-1, now))
            if count != known:
                self._seen[name] = count, now
            elif now - since >= self._seconds:
                stalled.append(name)
                self._seen[name] = count, float("inf")
        return stalled
