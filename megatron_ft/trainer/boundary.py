"""What one rank does at the end of an iteration: capture, skip, or say why it cannot."""

from __future__ import annotations

from megatron_ft.arena.format import Permit
from megatron_ft.trainer.adapter import State, StateAdapter
from megatron_ft.trainer.captures import Captures
from megatron_ft.trainer.fence import Fence
from megatron_ft.trainer.run import CaptureRun
from megatron_ft.trainer.stats import CaptureStats
from megatron_ft.trainer.ticket import Ticket
from megatron_ft.trainer.turn import Turn, turn
from megatron_ft.trainer.warner import Warner


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
        for snapshot in captures.verdicts.overdue(iteration):
            captures.judge(snapshot, "")
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
        if due is Turn.CAPTURE and not captures.verdicts.problem:
            return self._capture(permit, state)
        if due is Turn.CAPTURE:
            captures.refuse(permit.snapshot, captures.verdicts.problem)
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
