"""The public interface of a trainer: load, save, fence."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Permit
from megatron_ft.capture.client_protocol import RestoreOffer, SnapshotClient
from megatron_ft.capture.copier import Copier
from megatron_ft.capture.cpu import CpuCopier
from megatron_ft.capture.engine import CaptureEngine
from megatron_ft.capture.fence import Fence
from megatron_ft.capture.loss_gate import Verdicts
from megatron_ft.capture.mapping import MappingState
from megatron_ft.capture.plan import check_replicas, plan_state
from megatron_ft.capture.restore import compare, read_objects, restore_shard, verify
from megatron_ft.capture.run import CaptureRun
from megatron_ft.capture.state import HasCheckpointForm, TrainingState, live_tensors
from megatron_ft.capture.stats import CaptureStats, LastCapture
from megatron_ft.capture.ticket import Ticket, TicketBook
from megatron_ft.config import SnapshotConfig
from megatron_ft.environment import ProcessEnvironment
from megatron_ft.errors import CorruptBlockError, LayoutMismatchError
from megatron_ft.identity import SealedRecord, SnapshotId
from megatron_ft.identity import shard_id as make_shard_id
from megatron_ft.shard import ShardLayout
from megatron_ft.shard_meta import pack_meta
from megatron_ft.smp.client import TrainerClient

logger = logging.getLogger(__name__)

META_SPARE_BYTES = 65536
"""Room for small objects to grow beyond twice their first size."""

PLANNING_BLOCK_BYTES = 65536
"""The digest table is planned for blocks of this size; larger ones need less."""

State = Mapping[str, Any] | TrainingState


class Hookable(Protocol):
    """What register_fence needs of an optimizer."""

    def register_step_pre_hook(self, hook: Any, /) -> Any:
        """Call ``hook(optimizer, args, kwargs)`` before each step."""


class SnapshotManager:
    """Takes snapshots of one trainer rank's state into host memory, and restores them.

    Calling sequence: ``load`` once before training; ``save`` at the end of every
    iteration (it captures only where the job agreed to, and skips otherwise); the
    optimizer steps inside ``fence()``, or ``register_fence(optimizer)`` once; ``close``.
    All calls come from the training thread.  After start-up no call raises because of a
    snapshot: what fails is warned of, counted in ``stats`` and reported to the SMP.

    ``state`` is a mapping of names to tensors, DTensors, objects with state_dict and
    load_state_dict, or small picklable values; or a TrainingState.
    """

    def __init__(
        self,
        config: SnapshotConfig | None = None,
        *,
        shard_id: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        coordinates: tuple[int, ...] = (),
        replicated: Mapping[str, Any] | None = None,
        client: SnapshotClient | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Connect to nothing yet; ``load`` or the first ``save`` does.

        ``rank`` and ``world_size`` default to the variables RANK and WORLD_SIZE,
        ``shard_id`` to data-parallel rank ``rank``.  ``coordinates`` are the
        model-parallel ones without the data-parallel one.  ``replicated`` maps prefixes
        of tensor names to the process group whose ranks hold the same bits: each rank
        captures a part of the large ones, and a restore gives every rank the same whole.
        Leave out what is only nearly equal, or restored ranks continue from a mixture.
        Raises NotUnderSupervisorError outside ``megatron-ft run`` unless ``client`` is given.
        """
        self.config = config or SnapshotConfig.from_env()
        self.rank = _from_env("RANK", 0) if rank is None else rank
        self.world_size = _from_env("WORLD_SIZE", 1) if world_size is None else world_size
        self.shard_id = shard_id or make_shard_id(dp=self.rank)
        self.stats = CaptureStats()
        self._coordinates = coordinates
        self._replicated = replicated
        self._client = client or _connect(self.rank)
        self._client.on_outcome = self._on_outcome
        self._copier = copier
        self._fence = Fence(self.config.fence_timeout_seconds, self.stats)
        self._tickets = TicketBook()
        self._offer: RestoreOffer | None = None
        self._greeted = self._declined = False
        self._restored: ShardLayout | None = None
        self._engine: CaptureEngine | None = None
        self._form = b""
        self._run: CaptureRun | None = None
        self._last_permit: SnapshotId | None = None
        self._verdicts = Verdicts(self.config.loss_gate)
        self._warned: set[str] = set()
        self._hooks: list[Any] = []

    @property
    def offered_iteration(self) -> int:
        """The iteration of the snapshot that the job offers this rank, -1 if there is none.

        Asks the SMP the first time.
        """
        offer = self._hello()
        return -1 if offer is None else offer.record.iteration

    def offered_objects(self) -> dict[str, Any]:
        """The small objects of the offered snapshot, their digests checked; {} if there is none."""
        offer = self._hello()
        if offer is None:
            return {}
        with self._telling(), Arena.open(offer.arena_path) as arena:
            verify(arena, offer.slot, offer.record, self._report_corrupt, objects_only=True)
            return read_objects(arena, offer.slot, offer.record)

    def decline(self) -> None:
        """Start without the offered snapshot; all ranks must, or none.

        It stays in memory, and would be offered again, until a newer one is committed.
        """
        self._hello()
        self._declined = self._offer is not None
        self._offer = None

    def load(self, into: State) -> int:
        """Restore the snapshot that the job agreed on, in place; its iteration, or 0 if none.

        Every digest is checked before any byte is loaded.  Raises CorruptBlockError
        naming the blocks, or LayoutMismatchError naming the tensors that differ.
        """
        offer = self._hello()
        if offer is None:
            logger.info("rank %d (%s): no snapshot to load", self.rank, self.shard_id)
            return 0
        started = time.monotonic()
        with self._telling(), Arena.open(offer.arena_path) as arena:
            verify(arena, offer.slot, offer.record, self._report_corrupt)
            self._restored = restore_shard(
                arena,
                offer.slot,
                offer.record,
                self._as_state(into),
                self.config.replicated_split_bytes,
            )
        self.stats.committed(offer.record.iteration, protected=False)
        self._say_restored(offer, time.monotonic() - started)
        return offer.record.iteration

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What keeps this shard from its snapshot is told to the job before it ends this rank."""
        try:
            yield
        except (LayoutMismatchError, CorruptBlockError) as error:
            if isinstance(error, LayoutMismatchError):
                self._client.unfit(error)
            # Closing sends what is queued; the process is about to end.
            self._client.close()
            raise

    def prepare(self, state: State) -> None:
        """Plan the layout and wait for the arena; the first ``save`` does it if you do not.

        Call it when the state is complete: an optimizer's moments exist after its first
        step or a load.  Blocks until all ranks have come here; raises what start-up can
        raise (ArenaMemoryError, LayoutMismatchError, ControlPlaneError).
        """
        assert self._engine is None, "prepare was called twice"
        self._hello()
        adapted = self._as_state(state)
        layout = plan_state(adapted, self.config.replicated_split_bytes)
        check_replicas(adapted, layout)
        if self._restored is not None:
            with self._telling():
                compare(self._restored, layout)
        self._form = adapted.checkpoint_form() if isinstance(adapted, HasCheckpointForm) else b""
        meta = pack_meta(layout.to_bytes(), adapted.objects(), self._form)
        capacity = 2 * len(meta) + META_SPARE_BYTES
        path = self._client.prepare(
            layout.hash(),
            digest.required_bytes(layout.tensor_bytes, capacity, PLANNING_BLOCK_BYTES),
            self.config.snapshot_interval,
            timeout=self.config.register_timeout_seconds,
        )
        copier = self._copier or _choose_copier(adapted, self.config.copy_piece_bytes)
        self._engine = CaptureEngine(
            path, self.shard_id, layout, copier, self._on_sealed, self._on_abandoned
        )

    def save(self, iteration: int, state: State) -> Ticket:
        """Say that ``iteration`` has ended, and capture it if the job permits; returns at once.

        Call it at every iteration boundary, on all ranks.
        """
        if self._engine is None:
            self.prepare(state)
        try:
            return self._save(iteration, state)
        except Exception as error:
            # Snapshots are a service to training and must never end it.
            self._warn("save", "save(%d) failed: %r; training goes on", iteration, error)
            return self._skip(iteration)

    def report_loss(self, loss: float) -> None:
        """Tell the loss of the iteration that is about to end; before its ``save``.

        With the setting ``loss_gate`` a loss that is not finite, or a spike, keeps the
        snapshots of the state before and after it from replacing the last good one.  A rank that
        reports once must do so in every iteration; ranks without a loss never do.
        """
        for snapshot, problem in self._verdicts.report(loss):
            self._judge(snapshot, problem)

    def _judge(self, snapshot: SnapshotId, problem: str) -> None:
        if problem:
            self.stats.gated += 1
            self._warn("loss gate", "snapshot %s is given up: %s", snapshot, problem)
        self._client.judged(snapshot, problem)

    @contextmanager
    def fence(self) -> Iterator[None]:
        """Around whatever changes captured tensors: waits for a running copy, and only then.

        The wait is at most ``fence_timeout_seconds``; then the capture is abandoned.
        """
        self._fence.wait(self._run)
        yield

    def register_fence(self, optimizer: Hookable) -> Any:
        """Put the fence before each ``optimizer.step()``; returns the hook's handle."""
        handle = optimizer.register_step_pre_hook(
            lambda _optimizer, _args, _kwargs: self._fence.wait(self._run)
        )
        self._hooks.append(handle)
        return handle

    def close(self) -> None:
        """Let a running capture end, then unmap the arena and leave the SMP."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                self._fence.wait(self._run)
                engine.close(self.config.fence_timeout_seconds)
                for snapshot in self._verdicts.end():
                    self._judge(snapshot, "")
        finally:
            self._client.close()

    def _save(self, iteration: int, state: State) -> Ticket:
        assert self._engine is not None
        self._engine.arena.write_progress(iteration)
        for snapshot in self._verdicts.overdue(iteration):
            self._judge(snapshot, "")
        permit = self._engine.arena.permit()
        if permit is None or permit.snapshot == self._last_permit:
            self._repeat_end(permit)
            return self._skip(iteration)
        too_late = permit.iteration < iteration or self._is_for_offer(permit)
        if permit.revoked or too_late or self._busy(permit, iteration):
            self._miss(permit)
            return self._skip(iteration)
        if permit.iteration > iteration:
            return self._skip(iteration)
        if self._verdicts.problem:
            self._last_permit = permit.snapshot
            self._judge(permit.snapshot, self._verdicts.problem)
            self._client.abandoned(permit.snapshot, self._verdicts.problem)
            return self._skip(iteration)
        return self._capture(permit, state)

    def _is_for_offer(self, permit: Permit) -> bool:
        """Whether a permit was given for training that starts from a snapshot we declined.

        Only the first of a life can be: later ones follow what trainers have finished.
        """
        return self._declined and permit.snapshot.sequence == 1

    def _busy(self, permit: Permit, iteration: int) -> bool:
        """Whether an earlier capture still occupies the copy thread when this one is due."""
        running = self._run is not None and not self._run.finished.is_set()
        return running and permit.iteration == iteration

    def _repeat_end(self, permit: Permit | None) -> None:
        """Say again that nothing is written for a revoked permit, as long as it is shown.

        The first word may have died with an SMP, and without it the slot is never free.
        """
        idle = self._run is None or self._run.finished.is_set()
        if permit is not None and permit.revoked and idle:
            self._client.missed(permit.snapshot)

    def _skip(self, iteration: int) -> Ticket:
        self.stats.skipped += 1
        self.stats.due_skipped += iteration % self.config.snapshot_interval == 0
        return Ticket(iteration)

    def _miss(self, permit: Permit) -> None:
        self._last_permit = permit.snapshot
        self.stats.missed += 1
        self._client.missed(permit.snapshot)

    def _capture(self, permit: Permit, state: State) -> Ticket:
        assert self._engine is not None
        self._last_permit = permit.snapshot
        started = time.monotonic()
        ticket = Ticket(permit.iteration, permit.snapshot)
        self._verdicts.captured(permit.snapshot, permit.iteration)
        try:
            self._run = self._begin(permit, ticket, state)
        except Exception as error:
            self._give_up(permit, ticket, f"the capture could not start: {error!r}")
            return ticket
        finally:
            self.stats.stall_seconds += time.monotonic() - started
        if not self._fence.seen:
            self._hold_without_fence(self._run)
        return ticket

    def _begin(self, permit: Permit, ticket: Ticket, state: State) -> CaptureRun:
        """Check that the state still fits, and start."""
        assert self._engine is not None
        started = time.monotonic()
        adapted = self._as_state(state)
        live = live_tensors(adapted)
        mismatch = self._engine.binding.mismatch(live)
        if mismatch:
            raise ValueError(f"the layout has changed since it was planned ({mismatch})")
        meta = pack_meta(self._engine.binding.layout_bytes, adapted.objects(), self._form)
        self._tickets.add(ticket)
        return self._engine.begin(permit, ticket, live, meta, started)

    def _hold_without_fence(self, run: CaptureRun) -> None:
        """Wait for the copy here, as nothing says that anybody will before tensors change."""
        self._fence.wait(run)
        self._fence.seen = False
        if self.stats.skipped:
            self._warn(
                "fence",
                "no fence was seen before iteration %d: save() waits for its copies. Call "
                "register_fence(optimizer), or step inside `with snapshots.fence():`",
                run.permit.iteration,
            )

    def _on_sealed(self, run: CaptureRun, record: SealedRecord) -> None:
        seconds = time.monotonic() - run.began
        self.stats.last = LastCapture(
            run.permit.iteration, seconds, run.stall_seconds, run.copied_bytes
        )
        self.stats.taken += 1
        self.stats.copied_bytes += run.copied_bytes
        snapshot = run.permit.snapshot
        if self._verdicts.waits(snapshot):
            self._client.sealed(snapshot, record, judged_later=True)
        else:
            self._client.sealed(snapshot, record)
        self._client.cost(snapshot, run.stall_seconds, run.copy_seconds, run.copied_bytes)

    def _on_abandoned(self, run: CaptureRun, reason: str) -> None:
        self._give_up(run.permit, run.ticket, reason)

    def _give_up(self, permit: Permit, ticket: Ticket, reason: str) -> None:
        """Count, warn and report a capture that ended; nothing writes to its slot."""
        self.stats.abandoned += 1
        self._warn(
            reason, "snapshot %s (iteration %d): %s", permit.snapshot, permit.iteration, reason
        )
        self._tickets.discard(permit.snapshot)
        ticket.fail()
        self._client.abandoned(permit.snapshot, reason)

    def _on_outcome(self, snapshot: SnapshotId, outcome: str) -> None:
        ticket = self._tickets.outcome(snapshot, outcome)
        if ticket is not None and outcome == "committed":
            self.stats.committed(ticket.iteration, ticket.protected.result(timeout=0))

    def _hello(self) -> RestoreOffer | None:
        if not self._greeted:
            self._greeted = True
            self._offer = self._client.hello(self.shard_id, self._coordinates, self.world_size)
        return self._offer

    def _report_corrupt(self, blocks: int) -> None:
        assert self._offer is not None
        self._client.corrupt(self._offer.record.snapshot, blocks)

    def _as_state(self, state: State) -> TrainingState:
        if isinstance(state, Mapping):
            return MappingState(state, replicated=self._replicated)
        return state

    def _warn(self, once_per: str, message: str, *values: object) -> None:
        """Warn at the first of a kind, later ones at a level that does not flood the log."""
        level = logging.INFO if once_per in self._warned else logging.WARNING
        self._warned.add(once_per)
        logger.log(level, message, *values)

    def _say_restored(self, offer: RestoreOffer, seconds: float) -> None:
        record = offer.record
        text = (
            f"megatron-ft: {self.shard_id} restored iteration {record.iteration} "
            f"(snapshot {record.snapshot}) from {offer.source} in {seconds:.3f} s"
        )
        logger.info(text)
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)
        self._client.restored(record.snapshot, seconds, offer.source)


def _connect(rank: int) -> SnapshotClient:
    return TrainerClient(ProcessEnvironment.from_env(), rank, _from_env("LOCAL_RANK", 0))


def _from_env(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _choose_copier(state: TrainingState, piece_bytes: int) -> Copier:
    """The copier for where most tensors are; a CUDA one also takes host tensors."""
    if any(tensor.is_cuda for tensor in live_tensors(state).values()):
        from megatron_ft.capture.cuda import CudaCopier

        return CudaCopier(piece_bytes)
    return CpuCopier(piece_bytes)
