"""What SIGTERM does to a job: what is committed goes to disk, then all ends."""

from __future__ import annotations

import asyncio

from megatron_ft.supervisor.supervisor import Supervisor

EXIT_INTERRUPTED = 130
EXIT_DRAINED = 13
EXIT_NOT_DRAINED = 14


class Stop:
    """Ends ``run``, the task of a supervisor.  ``code`` is the exit code once it has ended."""

    def __init__(self, supervisor: Supervisor, run: asyncio.Future[None]) -> None:
        self.code = EXIT_INTERRUPTED
        self._supervisor, self._run = supervisor, run
        self._drain: asyncio.Task[None] | None = None

    def at_once(self) -> None:
        """End now; snapshots stay in memory."""
        self._run.cancel()

    def after_drain(self) -> None:
        """End when the newest committed snapshot is on disk or there was no time for it.

        Asked again, or without a drain folder, end at once.
        """
        if self._drain is not None or self._supervisor.spec.drain_dir is None:
            self.at_once()
        else:
            self.code = EXIT_NOT_DRAINED
            self._drain = asyncio.ensure_future(self._drain_first())

    async def _drain_first(self) -> None:
        seconds = self._supervisor.spec.drain_stop_seconds
        if await self._supervisor.drains.last(seconds):
            self.code = EXIT_DRAINED
        self.at_once()
