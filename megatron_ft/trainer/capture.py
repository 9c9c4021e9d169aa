"""The captures of one rank: decides at each boundary, starts one, and reports its end.

At the end of each iteration a rank reads the permit in its arena.  It captures where that permits
it, and reports the reason where it cannot.  The copy runs beside training; the fence holds training
before captured tensors change, and never longer than its timeout.

A fence counts for one boundary: in an iteration without one nothing holds a step.  Whatever changed
there gives its snapshot up, and from then on ``save`` waits for its copies.  Until it is known that
iterations without a fence change nothing (gradients accumulate, a loss scaler skips a step), it
waits behind each of them as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from pathlib import Path

from megatron_ft.arena.format import Permit
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.shard import ShardLayout
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import TrainerClient
from megatron_ft.trainer.binding import changed_early
from megatron_ft.trainer.capture_arena import CaptureArena
from megatron_ft.trainer.capture_run import CaptureRun
from megatron_ft.trainer.copier import Copier
from megatron_ft.trainer.engine import CaptureEngine
from megatron_ft.trainer.replicas import ReplicaDigester
from megatron_ft.trainer.state import KnowsOptimizers, TrainingState, WrapsTensors
from megatron_ft.trainer.stats import CaptureStats, IterationTimes, LateIterations, Warner
from megatron_ft.trainer.ticket import Ticket, TicketBook

logger = logging.getLogger(__name__)

STAY_POLL_SECONDS = 0.02
"""Interval at which a rank that stays at its boundary reads the permit."""


class BoundaryAction(Enum):
    """The answer of ``boundary_action``."""

    WAIT = auto()
    """Nothing is due now."""
    CAPTURE = auto()
    """This boundary is the permitted one."""
    MISS = auto()
    """This rank cannot take the permitted snapshot, and reports that."""
    REACKNOWLEDGE = auto()
    """The last permit is void: report again that nothing is written for it.

    An SMP may have died with the first report, without which the slot is never free.
    """


def boundary_action(
    permit: Permit | None,
    iteration: int,
    last: SnapshotId | None,
    *,
    busy: bool,
    declined: bool,
    went_back: bool,
) -> BoundaryAction:
    """Decides what is due when ``iteration`` has ended; ``last`` is the snapshot answered for last.

    ``busy`` says that the copy thread has not finished an earlier capture.  ``declined`` that
    this rank started without the snapshot it was offered: the first permit of such an incarnation
    was given for training that starts from it; later ones follow what trainers have finished.
    ``went_back`` that a later iteration had ended before this one did, as the script has loaded an
    older checkpoint: a permit from then is for an iteration that is far away now.
    """
    if permit is None:
        return BoundaryAction.WAIT
    if permit.snapshot == last:
        return BoundaryAction.REACKNOWLEDGE if permit.revoked else BoundaryAction.WAIT
    for_the_offer = declined and permit.snapshot.sequence == 1
    if permit.revoked or permit.iteration < iteration or for_the_offer:
        return BoundaryAction.MISS
    if permit.iteration > iteration:
        return BoundaryAction.MISS if went_back else BoundaryAction.WAIT
    return BoundaryAction.MISS if busy else BoundaryAction.CAPTURE


class CaptureController:
    """Captures one rank's state where the job permits it, and reports the outcome.

    Calling sequence: ``open`` once; then ``end_iteration`` at each boundary and ``fence`` before
    captured tensors change, all from the training thread; ``close``.  The ends of captures come
    from the copy thread, those of snapshots from the client's.
    """

    def __init__(
        self, client: TrainerClient, config: SnapshotConfig, stats: CaptureStats, warn: Warner
    ) -> None:
        self._client, self._stats, self._warn = client, stats, warn
        self._timeout_seconds = config.fence_timeout_seconds
        self._replicas = ReplicaDigester(config.compare_replicas, config.compare_except or "")
        self._times, self._was_under_way = IterationTimes(), False
        self._late = LateIterations(config.p99_budget_percent)
        self._tickets = TicketBook()
        self._arena = CaptureArena(client, warn, self._replicas.forget)
        self._run: CaptureRun | None = None
        self._answered: SnapshotId | None = None
        self._ended = -1
        self._any_fence = self._fenced = self._idle_changes_nothing = False
        client.on_outcome = self._on_outcome

    @property
    def is_open(self) -> bool:
        return self._arena.is_open

    @property
    def running(self) -> bool:
        return self._run is not None and not self._run.finished.is_set()

    @property
    def under_way(self) -> bool:
        """True while a capture runs, or the outcome of a captured snapshot is open."""
        return self.running or self._tickets.any_open

    def open(
        self, path: Path, shard_id: str, layout: ShardLayout, copier: Copier, form: bytes
    ) -> None:
        """Map the arena at ``path``; ``form`` is stored with each snapshot."""

        def make(path: Path, layout: ShardLayout) -> CaptureEngine:
            ends = self._on_started, self._on_sealed, self._on_abandoned
            return CaptureEngine(path, shard_id, layout, copier, *ends)

        self._arena.open(make, path, layout, form)

    def end_iteration(
        self,
        iteration: int,
        adapt: Callable[[], TrainingState],
        *,
        declined: bool,
        seconds: float | None = None,
    ) -> Ticket:
        """Do what is due at the end of ``iteration``, which took ``seconds`` (None: not counted).

        ``adapt`` makes the state of now, if it is captured.  ``declined`` says that this rank
        started without the snapshot that it was offered.
        """
        self._times.end(time.monotonic(), self._stats.stall_seconds)
        late = self._late.ended(seconds, self._was_under_way)
        if late is not None:
            self._client.send(m.Slowed(self._client.shard_id, iteration, late))
        ticket = self._answer_permit(iteration, adapt, declined)
        self._was_under_way = self.under_way or not ticket.skipped
        self._times.start(time.monotonic(), self._stats.stall_seconds, self.under_way)
        return ticket

    def skip(self, iteration: int) -> Ticket:
        self._stats.skipped += 1
        return Ticket(iteration)

    def _answer_permit(
        self, iteration: int, adapt: Callable[[], TrainingState], declined: bool
    ) -> Ticket:
        if not self._fenced:
            self._check_unfenced(iteration, adapt)
        fenced, self._fenced = self._fenced, False
        if went_back := iteration < self._ended:
            self._warn(
                "order",
                "save(%d) follows save(%d): right after the script has loaded an older checkpoint "
                "in this process, otherwise a mistake: numbers have to rise from call to call",
                iteration,
                self._ended,
            )
        if not self.running:
            self._arena.move(self._timeout_seconds)
        if (engine := self._arena.engine) is None:
            self._ended = iteration
            return self.skip(iteration)
        self._arena.publish(iteration)
        permit = engine.arena.permit()
        due = boundary_action(
            permit,
            iteration,
            self._answered,
            busy=self.running,
            declined=declined,
            went_back=went_back,
        )
        self._ended = iteration
        if permit is None or due is BoundaryAction.WAIT:
            return self.skip(iteration)
        if due is BoundaryAction.CAPTURE:
            return self._start(permit, adapt, fenced or self._idle_changes_nothing)
        if due is BoundaryAction.MISS:
            self._answered = permit.snapshot
            self._stats.missed += 1
            self._client.send(m.Missed(self._client.shard_id, permit.snapshot))
        elif not self.running:
            # While it runs, the SMP would take the slot for free.
            self._client.send(m.Missed(self._client.shard_id, permit.snapshot))
        return self.skip(iteration)

    def _start(self, permit: Permit, adapt: Callable[[], TrainingState], may_last: bool) -> Ticket:
        """Check that the state still fits, and start; what fails is counted and reported.

        The copy is waited for here unless it ``may_last`` until the next fence.
        """
        self._answered = permit.snapshot
        started = time.monotonic()
        ticket = Ticket(permit.iteration, permit.snapshot)
        try:
            self._run = self._made_run(permit, ticket, adapt(), started)
        except Exception as error:
            self._give_up(permit, ticket, f"the capture could not start: {error!r}")
            return ticket
        finally:
            self._stats.stall_seconds += time.monotonic() - started
        assert self._arena.engine is not None
        binding = self._arena.engine.binding
        if not may_last or binding.hurries_all:
            self._wait_unfenced(self._run)
        elif binding.hurries:
            self._wait(early=True)
        self._stay_at_boundary(permit, ticket, started + permit.stay)
        return ticket

    def _made_run(
        self, permit: Permit, ticket: Ticket, state: TrainingState, started: float
    ) -> CaptureRun:
        live, meta = self._arena.fit(state)
        assert self._arena.engine is not None
        compare = None
        if self._replicas.due(permit.snapshot):
            compare = partial(self._replicas.digests, state)
        self._tickets.add(ticket)
        wrapped = state.wrapped() if isinstance(state, WrapsTensors) else None
        return self._arena.engine.start(permit, ticket, live, meta, started, compare, wrapped)

    def _stay_at_boundary(self, permit: Permit, ticket: Ticket, until: float) -> None:
        """Stay at this boundary until the job ends this incarnation, which loses nothing then.

        Training continues when the snapshot is not committed with parity, when the permit is
        of another snapshot, or when the time is over.
        """
        assert self._arena.engine is not None
        while time.monotonic() < until and not ticket.spoiled:
            if self._arena.engine.revoked(permit):
                return
            time.sleep(STAY_POLL_SECONDS)

    def fence(self) -> None:
        """Return when the tensors may change: the copy is done, or has been given up.

        When the timeout is over the copier stops after its current piece and the slot will never
        be sealed, so it does not matter that bytes change under it.
        """
        self._any_fence = self._fenced = True
        run, waited = self._run, self._wait()
        if run is None or run.witness is None:
            return
        # The copy thread has checked what was copied while training stood here.
        changed = [] if waited else run.find_changes(last=True, fenced=True)
        run.forget()
        if changed and self._arena.engine is not None:
            self._arena.engine.binding.hurry(changed)
            if run.finished.is_set() and not run.stop_reason:
                self._warn("early", "iteration %d: %s", self._ended + 1, changed_early(changed))

    def _check_unfenced(self, iteration: int, adapt: Callable[[], TrainingState]) -> None:
        """An iteration without a fence has ended: find out whether it has changed anything."""
        run, engine = self._run, self._arena.engine
        if run is None or engine is None or run.witness is None:
            return
        changed = run.find_changes(last=True)
        if not changed and run.witness is None and not run.stop_reason:
            changed = [s.pieces[0].entry.name for s in run.samples if not s.is_live()]
            self._idle_changes_nothing |= bool(run.samples) and not changed
        if run.witness is None:
            run.forget()
        if not changed:
            return
        engine.binding.hurry()
        self._idle_changes_nothing = False
        run.give_up(changed_early(changed))
        state = adapt()
        owner = state.optimizer_of(changed) if isinstance(state, KnowsOptimizers) else ""
        self._warn(
            "unfenced",
            "%s changed in iteration %d, and no fence came before%s: save() waits for all of its "
            "copies from now on. Call register_fence(optimizer), or step inside "
            "`with snapshots.fence():`",
            changed[0],
            iteration,
            owner and f" the step of {owner}",
        )

    def let_go(self) -> None:
        """Keep no captured tensor, and no view of its memory.

        Waits as ``fence`` does, but does not count as a fence of this iteration."""
        self._wait()
        if self._run is not None:
            self._run.forget()
        self._arena.forget_tensors()

    def _wait_unfenced(self, run: CaptureRun) -> None:
        """Wait for the copy here, as no fence may come before tensors change."""
        self._wait()
        if self._stats.skipped and not self._any_fence:
            self._warn(
                "fence",
                "no fence was seen before iteration %d: save() waits for its copies. Call "
                "register_fence(optimizer), or step inside `with snapshots.fence():`",
                run.permit.iteration,
            )

    def _wait(self, *, early: bool = False) -> bool:
        """Wait for the copy, or for the ``early`` part of it; True if a copy was running.

        Digests may still be computed afterwards: they read the arena, not the tensors.
        """
        run = self._run
        if run is None or run.moved.is_set():
            return False
        started = time.monotonic()
        wait = run.wait_early if early else run.wait_moved
        arrived = wait(self._timeout_seconds)
        self._stats.stall_seconds += time.monotonic() - started
        if arrived:
            return True
        run.forget()
        reason = f"the fence waited {self._timeout_seconds:g} s for the copy"
        if run.stop(reason):
            logger.warning(
                "snapshot %s of iteration %d is abandoned: %s; training continues. Raise "
                "fence_timeout_seconds, or find what slows down copies to host memory",
                run.permit.snapshot,
                run.permit.iteration,
                reason,
            )
        return True

    def close(self, *, at_once: bool = False) -> None:
        """Let a running capture end, or give it up, and unmap the arena.

        A second call does nothing.
        """
        if not self.is_open:
            return
        if at_once and self._run is not None:
            self._run.stop("the job restarts")
        self._wait()
        self._arena.close(self._timeout_seconds)

    def _on_started(self, snapshot: SnapshotId, iteration: int, slot: int) -> None:
        """Ask for the promised slot; its header shows when it is this snapshot's."""
        self._client.send(m.Begins(self._client.shard_id, snapshot, iteration, slot))

    def _on_sealed(self, run: CaptureRun, record: SealedRecord) -> None:
        """The engine has captured everything, digests included."""
        stats, snapshot = self._stats, run.permit.snapshot
        stats.taken += 1
        stats.copied_bytes += run.copied_bytes
        cost = m.CaptureCost(
            self._client.shard_id,
            snapshot,
            run.stall_seconds,
            run.copy_seconds,
            run.copied_bytes,
            self._times.iteration_seconds,
            self._times.shadow_seconds,
        )
        self._client.send(cost)
        # The cost first: the node's report leaves with the last of its ranks' Sealed.
        self._client.send(m.Sealed(record, run.replicas))

    def _on_abandoned(self, run: CaptureRun, reason: str) -> None:
        self._give_up(run.permit, run.ticket, reason)

    def _give_up(self, permit: Permit, ticket: Ticket, reason: str) -> None:
        """Count, warn and report a capture that ended; nothing writes to its slot."""
        self._stats.abandoned += 1
        self._warn(
            reason, "snapshot %s (iteration %d): %s", permit.snapshot, permit.iteration, reason
        )
        self._tickets.discard(permit.snapshot)
        ticket.fail()
        self._client.send(m.Abandoned(self._client.shard_id, permit.snapshot, reason))

    def _on_outcome(self, snapshot: SnapshotId, outcome: str) -> None:
        ticket = self._tickets.outcome(snapshot, outcome)
        if ticket is not None and outcome == "committed":
            self._stats.committed(ticket.iteration, ticket.protected.result(timeout=0))
