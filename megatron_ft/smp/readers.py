"""The processes that read snapshots of a node, watched through pidfds and never killed.

Nothing is stored: an SMP that is restarted has forgotten them, which they notice by the
header of the slot that they read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.smp.writers import open_pidfd

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
