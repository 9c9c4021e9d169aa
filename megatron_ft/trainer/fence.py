"""The wait before captured tensors may change."""

from __future__ import annotations

import logging
import time

from megatron_ft.trainer.run import CaptureRun
from megatron_ft.trainer.stats import CaptureStats

logger = logging.getLogger(__name__)


class Fence:
    """Holds the training thread while a copy runs, never longer than the timeout.

    Digests may still be computed behind it: they read the arena, not the tensors.
    ``seen`` tells whether training has ever come through here.
    """

    def __init__(self, timeout_seconds: float, stats: CaptureStats) -> None:
        """``stats`` gets the seconds waited."""
        self._timeout_seconds = timeout_seconds
        self._stats = stats
        self.seen = False

    def wait(self, run: CaptureRun | None) -> None:
        """Return when the tensors may change: the copy is done, or has been given up.

        Meanwhile this thread copies too, where the rank has a core for that.  When the timeout is
        over the copier is told to stop after its current piece and the slot will never be sealed,
        so it does not matter that bytes change under it.
        """
        self.seen = True
        self.hold(run)

    def hold(self, run: CaptureRun | None) -> None:
        """As ``wait``, and says nothing of whether training comes through here before it steps."""
        if run is None or run.moved.is_set():
            return
        started = time.monotonic()
        arrived = run.wait_moved(self._timeout_seconds)
        self._stats.stall_seconds += time.monotonic() - started
        if arrived:
            return
        reason = f"the fence waited {self._timeout_seconds:g} s for the copy"
        if run.stop(reason):
            logger.warning(
                "snapshot %s of iteration %d is abandoned: %s; training goes on. Raise "
                "fence_timeout_seconds, or find what slows down copies to host memory",
                run.permit.snapshot,
                run.permit.iteration,
                reason,
            )
