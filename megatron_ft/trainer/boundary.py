"""What one rank does at the end of an iteration: capture, skip, or say why it cannot.

What a rank does at an iteration boundary, given the permit that it sees.  Pure.

The wait before captured tensors may change.
"""

from __future__ import annotations

import logging
import time
from enum import Enum, auto

from megatron_ft.arena.format import Permit
from megatron_ft.core.identity import SnapshotId
from megatron_ft.trainer.captures import Captures
from megatron_ft.trainer.mapping import State, StateAdapter
from megatron_ft.trainer.run import CaptureRun
from megatron_ft.trainer.stats import CaptureStats, Warner
from megatron_ft.trainer.ticket import Ticket


class Turn(Enum):
    """The answer of ``turn``."""

    WAIT = auto()
    """Nothing is due now."""
    CAPTURE = auto()
    """This boundary is the permitted one."""
    MISS = auto()
    """This rank cannot take the permitted snapshot, and says so."""
    REPEAT = auto()
    """What was permitted last is void: say again that nothing is written for it.

    The first word may have died with an SMP, and without it the slot is never free.
    """


def turn(
    permit: Permit | None,
    iteration: int,
    last: SnapshotId | None,
    *,
    busy: bool,
    declined: bool,
    went_back: bool,
) -> Turn:
    """What is due when ``iteration`` has ended and ``last`` was the snapshot answered for last.

    ``busy`` says that the copy thread has not finished an earlier capture.  ``declined`` that
    this rank started without the snapshot it was offered: the first permit of such an incarnation
    was given for training that starts from it; later ones follow what trainers have finished.
    ``went_back`` that a later iteration had ended before this one did, as the script has loaded an
    older checkpoint: a permit from then is for an iteration that is far away now.
    """
    if permit is None:
        return Turn.WAIT
    if permit.snapshot == last:
        return Turn.REPEAT if permit.revoked else Turn.WAIT
    for_the_offer = declined and permit.snapshot.sequence == 1
    if permit.revoked or permit.iteration < iteration or for_the_offer:
        return Turn.MISS
    if permit.iteration > iteration:
        return Turn.MISS if went_back else Turn.WAIT
    return Turn.MISS if busy else Turn.CAPTURE


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


class Boundary:
    """Reads the permit at each iteration boundary and does what it asks for.

    ``interval`` is the fixed number of iterations between snapshots, 0 if the job chooses it.
    """

    def __init__(
        self,
        captures: Captures,
        fence: Fence,
        adapt: StateAdapter,
        stats: CaptureStats,
        warn: Warner,
        interval: int,
    ) -> None:
        self._captures, self._fence, self._adapt = captures, fence, adapt
        self._stats, self._warn, self._interval = stats, warn, interval
        self._ended = -1

    def take(self, iteration: int, state: State, *, declined: bool) -> Ticket:
        """``iteration`` has ended with this state; the engine must be there.

        ``declined`` says that this rank started without the snapshot that it was offered.
        """
        captures = self._captures
        assert captures.engine is not None
        captures.engine.arena.write_progress(iteration)
        permit = captures.engine.arena.permit()
        due = turn(
            permit,
            iteration,
            captures.last,
            busy=captures.running,
            declined=declined,
            went_back=iteration < self._ended,
        )
        self._ended = iteration
        if permit is None or due is Turn.WAIT:
            return self.skip(iteration)
        if due is Turn.CAPTURE and not captures.losses.problem:
            return self._capture(permit, state)
        if due is Turn.CAPTURE:
            captures.refuse(permit.snapshot, captures.losses.problem)
        elif due is Turn.MISS:
            captures.miss(permit.snapshot)
        elif not captures.running:
            captures.repeat(permit.snapshot)
        return self.skip(iteration)

    def skip(self, iteration: int) -> Ticket:
        """Count an iteration of which nothing is captured."""
        self._stats.skipped += 1
        self._stats.due_skipped += self._interval > 0 and iteration % self._interval == 0
        return Ticket(iteration)

    def _capture(self, permit: Permit, state: State) -> Ticket:
        before = self._captures.run
        ticket = self._captures.begin(permit, lambda: self._adapt(state))
        run = self._captures.run
        if run is not None and run is not before and not self._fence.seen:
            self.hold_without_fence(run)
        return ticket

    def hold_without_fence(self, run: CaptureRun) -> None:
        """Wait for the copy here, as nothing says that anybody will before tensors change."""
        self._fence.hold(run)
        if self._stats.skipped:
            self._warn(
                "fence",
                "no fence was seen before iteration %d: save() waits for its copies. Call "
                "register_fence(optimizer), or step inside `with snapshots.fence():`",
                run.permit.iteration,
            )
