"""Keeps the place of a living SMP: folder, lock, notes and socket come back if they are removed.

The SMP alone knows who writes to its arenas and what it was told, so it stays.  Arenas whose
files are gone cannot come back: the next admission counts them as lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import BinaryIO

from megatron_ft.core import private_files
from megatron_ft.core.word import QuietWord
from megatron_ft.smp.host import NodeHost
from megatron_ft.smp.local_server import LocalServer
from megatron_ft.smp.ownership import PID_NAME, is_at, make_node_dir, own

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

SLURM_JOB = "slurm-job"
"""Holds the number of the Slurm job that a node's folder is of, for scripts/slurm/epilog.sh."""


class NodePlace:
    """A node's folder and its lock, which this process holds for as long as it lives."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory, self._job = directory, job
        self._lock: BinaryIO | None = None

    def take(self, *, send_away: bool = True) -> None:
        """Make the folder and hold its lock; errors as of ``own``."""
        directory = self.directory
        make_node_dir(directory)
        number = os.environ.get("SLURM_JOB_ID")
        if number is not None:
            private_files.rewrite_file(directory / SLURM_JOB, number.encode())
        self.close()
        self._lock = own(directory, self._job, send_away=send_away)

    def whole(self) -> bool:
        """Whether folder and lock are where they were."""
        return self._lock is not None and is_at(self._lock, self.directory)

    def close(self) -> None:
        """Let the lock go."""
        if self._lock is not None:
            self._lock.close()


class Keeper:
    """Looks after the place of one SMP: once a second, and before each incarnation."""

    def __init__(self, host: NodeHost, local: LocalServer, place: NodePlace) -> None:
        self._host, self._local, self._place = host, local, place
        host.keep_place = self.look

    async def run(self) -> None:
        """Look until cancelled.  Where nothing can be made this SMP ends, and is replaced."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._host.keep_place()

    def look(self) -> None:
        """Make again what is missing."""
        whole = self._place.whole()
        if not whole:
            log.error("%s was removed: it is made again", self._place.directory)
            self._place.take(send_away=False)
            self._host.write_notes()
            self._host.quiet = QuietWord(self._place.directory, create=True)
            write_pid(self._place.directory)
        if not whole or not self._local.in_place():
            log.error("the socket in %s was removed: it is made again", self._place.directory)
            self._local.bind_again()


def write_pid(directory: Path) -> None:
    """Say which process the SMP of this folder is."""
    private_files.rewrite_file(directory / PID_NAME, str(os.getpid()).encode())
