"""The processes that read snapshots of a node, watched through pidfds and never killed.

Nothing is stored: an SMP that is restarted has forgotten them, which they notice by the
header of the slot that they read.

Readers that do not get on: a disk that hangs, or a process that is suspended.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.smp.writers import open_pidfd

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


MOST_READERS = 256
"""Each holds a descriptor."""


class Readers:
    """Live readers by name.  ``on_death`` is called with the name, from the event loop."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._pidfds: dict[str, int] = {}
        self._pids: dict[str, int] = {}

    def pids(self) -> dict[str, int]:
        """The processes of those that are watched."""
        return dict(self._pids)

    def watch(self, reader: str, pid: int) -> None:
        """Watch a process under this name; ControlPlaneError if it is dead, or there are many."""
        self.forget(reader)
        if len(self._pidfds) >= MOST_READERS:
            raise ControlPlaneError(f"{len(self._pidfds)} readers hold snapshots already")
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError as error:
            raise ControlPlaneError(f"process {pid} is gone") from error
        self._pidfds[reader], self._pids[reader] = pidfd, pid
        asyncio.get_running_loop().add_reader(pidfd, self._died, reader)

    def forget(self, reader: str) -> None:
        """Watch it no more; one that is unknown is none of ours."""
        self._pids.pop(reader, None)
        pidfd = self._pidfds.pop(reader, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def forget_all(self) -> None:
        """A new incarnation was admitted: all pins are void."""
        for reader in list(self._pidfds):
            self.forget(reader)

    def _died(self, reader: str) -> None:
        self.forget(reader)
        self._on_death(reader)
