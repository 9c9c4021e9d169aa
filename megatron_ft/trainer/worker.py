"""The copy thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class CopyThread:
    """One daemon thread that runs one job at a time, in order.

    A daemon, so that a trainer that exits without close() is not held back; what it
    was copying is then a slot that was never sealed.
    """

    def __init__(self, enter: Job, timeout_seconds: float) -> None:
        """Start the thread and run ``enter`` in it before the first job."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._loop, args=(enter,), name="megatron-ft-copy", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(timeout_seconds):
            raise TimeoutError(f"the copy thread did not start within {timeout_seconds} s")

    def submit(self, job: Job) -> None:
        """Run ``job`` after those submitted before."""
        self._jobs.put(job)

    def close(self, timeout_seconds: float) -> bool:
        """End after the jobs in the queue; False if that takes too long."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _loop(self, enter: Job) -> None:
        try:
            enter()
        except Exception:
            logger.exception("the copy thread could not be set up; it goes on with defaults")
        self._ready.set()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a capture failed in an unexpected place")
            del job
