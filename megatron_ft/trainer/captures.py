"""Captures of one rank: the one that runs, what became of them, and who is told.

What an iteration takes with and without a snapshot under way, on one rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median

from megatron_ft.arena.format import Permit
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.objects import encode
from megatron_ft.core.shard_meta import pack_encoded
from megatron_ft.trainer.binding import layout_changed
from megatron_ft.trainer.engine import CaptureEngine
from megatron_ft.trainer.loss_gate import LossGate
from megatron_ft.trainer.protocols import SnapshotClient
from megatron_ft.trainer.run import CaptureRun
from megatron_ft.trainer.state import TrainingState, live_tensors
from megatron_ft.trainer.stats import CaptureStats, LastCapture, Warner
from megatron_ft.trainer.ticket import Ticket, TicketBook

QUIET_WINDOW = 32
SHADOW_WINDOW = 9
MOST_BUSY = 256
"""A snapshot under way for longer than so many iterations says nothing of its shadow."""


class IterationTimes:
    """Learns the usual iteration and the shadow of a snapshot: by how much iterations are longer
    while it is copied, encoded and committed, besides the time that training is held for it.

    Both are medians, in seconds, 0 until known.  An iteration that takes more than twice the
    usual one had another reason (an evaluation, a checkpoint) and counts as twice.
    Written by the training thread alone; others read the two numbers.
    """

    def __init__(self) -> None:
        self.iteration_seconds = 0.0
        self.shadow_seconds = 0.0
        self._quiet: deque[float] = deque(maxlen=QUIET_WINDOW)
        self._shadows: deque[float] = deque(maxlen=SHADOW_WINDOW)
        self._busy: list[float] = []
        self._began: tuple[float, float, bool] | None = None

    def begin(self, now: float, stall: float, busy: bool) -> None:
        """An iteration begins: the time, all stalls so far, whether a snapshot is under way."""
        self._began = (now, stall, busy)

    def end(self, now: float, stall: float) -> None:
        """It has ended.  Stalls in it are none of its time: they are counted by themselves."""
        if self._began is None:
            return
        then, stall_then, busy = self._began
        self._began = None
        seconds = max(0.0, now - then - (stall - stall_then))
        if busy:
            self._busy.append(seconds)
            del self._busy[MOST_BUSY + 1 :]
            return
        self._settle()
        self._quiet.append(seconds)
        self.iteration_seconds = median(self._quiet)

    def _settle(self) -> None:
        """The snapshot is over: what its iterations took beyond the usual is its shadow."""
        busy, self._busy = self._busy, []
        usual = self.iteration_seconds
        if not busy or not usual or len(busy) > MOST_BUSY:
            return
        self._shadows.append(sum(min(seconds, 2 * usual) - usual for seconds in busy))
        self.shadow_seconds = max(0.0, median(self._shadows))


class Captures:
    """Starts captures on ``engine`` and reports their ends, which it hears in the copy thread.

    ``engine`` is None until the layout is planned, and again after the end; ``last`` is the
    snapshot that this rank answered for last.  ``form`` is stored with each snapshot.
    """

    def __init__(
        self, client: SnapshotClient, stats: CaptureStats, loss_gate: float, warn: Warner
    ) -> None:
        self.engine: CaptureEngine | None = None
        self.form = b""
        self.run: CaptureRun | None = None
        self.last: SnapshotId | None = None
        self.losses = LossGate(loss_gate)
        self.times = IterationTimes()
        self._client, self._stats, self._warn = client, stats, warn
        self._tickets = TicketBook()
        client.on_outcome = self._on_outcome

    @property
    def running(self) -> bool:
        """Whether the copy thread still works on one."""
        return self.run is not None and not self.run.finished.is_set()

    @property
    def under_way(self) -> bool:
        """Whether the job has not heard the end of a snapshot that this rank has captured."""
        return self.running or self._tickets.any_open

    def miss(self, snapshot: SnapshotId) -> None:
        """This rank does not take a permitted snapshot."""
        self.last = snapshot
        self._stats.missed += 1
        self._client.missed(snapshot)

    def repeat(self, snapshot: SnapshotId) -> None:
        """Say once more that nothing is written for a snapshot that this rank answered for."""
        self._client.missed(snapshot)

    def refuse(self, snapshot: SnapshotId, problem: str) -> None:
        """The state is not worth a snapshot: the loss that led here was bad."""
        self.last = snapshot
        self._stats.gated += 1
        self._warn("loss gate", "snapshot %s is refused: %s", snapshot, problem)
        self._client.abandoned(snapshot, problem)

    def begin(self, permit: Permit, adapt: Callable[[], TrainingState]) -> Ticket:
        """Check that the state still fits, and start; what fails is counted and told.

        ``adapt`` makes the state, whose failure is this capture's.
        """
        self.last = permit.snapshot
        started = time.monotonic()
        ticket = Ticket(permit.iteration, permit.snapshot)
        try:
            self.run = self._begin(permit, ticket, adapt(), started)
        except Exception as error:
            self._give_up(permit, ticket, f"the capture could not start: {error!r}")
        finally:
            self._stats.stall_seconds += time.monotonic() - started
        return ticket

    def _begin(
        self, permit: Permit, ticket: Ticket, state: TrainingState, started: float
    ) -> CaptureRun:
        assert self.engine is not None
        live = live_tensors(state)
        mismatch = self.engine.binding.mismatch(live)
        if mismatch:
            raise ValueError(layout_changed(mismatch))
        # Encoded now, as training goes on with them; put beside the layout by the copy thread.
        objects = encode(state.objects())
        meta = partial(pack_encoded, self.engine.binding.layout_bytes, objects, self.form)
        self._tickets.add(ticket)
        return self.engine.begin(permit, ticket, live, meta, started)

    def on_sealed(self, run: CaptureRun, record: SealedRecord) -> None:
        """The engine has captured everything, digests included."""
        stats, snapshot = self._stats, run.permit.snapshot
        seconds = time.monotonic() - run.began
        stats.last = LastCapture(run.permit.iteration, seconds, run.stall_seconds, run.copied_bytes)
        stats.taken += 1
        stats.copied_bytes += run.copied_bytes
        self._client.cost(
            snapshot,
            run.stall_seconds,
            run.copy_seconds,
            run.copied_bytes,
            self.times.iteration_seconds,
            self.times.shadow_seconds,
        )
        # The cost first: the node's report leaves with the last of its ranks' Sealed.
        self._client.sealed(snapshot, record)

    def on_abandoned(self, run: CaptureRun, reason: str) -> None:
        """The engine has stopped a capture and writes no more for it."""
        self._give_up(run.permit, run.ticket, reason)

    def _give_up(self, permit: Permit, ticket: Ticket, reason: str) -> None:
        """Count, warn and report a capture that ended; nothing writes to its slot."""
        self._stats.abandoned += 1
        self._warn(
            reason, "snapshot %s (iteration %d): %s", permit.snapshot, permit.iteration, reason
        )
        self._tickets.discard(permit.snapshot)
        ticket.fail()
        self._client.abandoned(permit.snapshot, reason)

    def _on_outcome(self, snapshot: SnapshotId, outcome: str) -> None:
        ticket = self._tickets.outcome(snapshot, outcome)
        if ticket is not None and outcome == "committed":
            self._stats.committed(ticket.iteration, ticket.protected.result(timeout=0))
