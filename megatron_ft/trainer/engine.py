"""One trainer's mapped arena, its copier and its copy thread: how a capture is carried out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Permit, SlotState
from megatron_ft.core.errors import ArenaCorruptError, ArenaForeignError, ControlPlaneError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.shard import ShardLayout
from megatron_ft.trainer.binding import LayoutBinding
from megatron_ft.trainer.copier import Copier
from megatron_ft.trainer.run import CaptureRun, StopWatch
from megatron_ft.trainer.shared_pieces import SharedPieces, ShouldStop
from megatron_ft.trainer.ticket import Ticket
from megatron_ft.trainer.worker import CopyThread

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
SLOT_SECONDS = 1.0
"""So long at most the SMP may take to give the slot; then the capture is abandoned."""

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.0001, 0.005
"""Between two looks at the slot's header."""

Begins = Callable[[SnapshotId, int, int], None]
Sealed = Callable[[CaptureRun, SealedRecord], None]
Abandoned = Callable[[CaptureRun, str], None]


class CaptureEngine:
    """Carries out captures into one arena, one at a time.

    ``begins``, with snapshot, iteration and slot, ``sealed`` and ``abandoned`` are called in
    the copy thread.  The slot holds an older snapshot until its header says that it is this
    capture's, for which ``begins`` asks.  Exactly one of the other two is called per run, and
    only when nothing writes to the slot any more.
    """

    def __init__(
        self,
        path: Path,
        shard_id: str,
        layout: ShardLayout,
        copier: Copier,
        begins: Begins,
        sealed: Sealed,
        abandoned: Abandoned,
    ) -> None:
        """Map the arena at ``path`` and start the copy thread; nothing is kept on an error."""
        self._shard_id = shard_id
        self._copier = copier
        self._begins = begins
        self._sealed = sealed
        self._abandoned = abandoned
        self.arena = Arena.open(path)
        try:
            self._bind(layout)
            self._thread = CopyThread(copier.enter_thread, START_SECONDS)
        except BaseException:
            self.arena.close()
            raise

    def _bind(self, layout: ShardLayout) -> None:
        header = self.arena.header
        if header.shard_id != self._shard_id:
            raise ArenaForeignError(
                f"{self.arena.path} is the arena of {header.shard_id}, not of {self._shard_id}: "
                "give every rank a shard id of its own"
            )
        self._block_bytes = header.geometry.block_bytes
        self._algorithm = header.digest_algorithm
        slots = range(header.geometry.slot_count)
        for slot in slots:
            self.arena.prefault(slot)
        self._regions = [self.arena.data(slot, writable=True) for slot in slots]
        self._dirty: list[int | None] = [None for _ in slots]
        self.binding = LayoutBinding(layout, self._regions)
        self._copier.attach(self._regions)

    def begin(
        self,
        permit: Permit,
        ticket: Ticket,
        live: Mapping[str, torch.Tensor],
        meta: Callable[[], bytes],
        started: float,
    ) -> CaptureRun:
        """Secure what may change at once and start the copy of the rest.

        ``meta`` gives what lies behind the tensors, in the copy thread.  ``started`` is the
        monotonic time since when training has been held.  An exception leaves nothing behind
        that writes to the slot.
        """
        reach("capture.permitted")
        staged = self._copier.stage(self.binding.at_boundary(live, permit.slot))
        run = CaptureRun(
            permit,
            ticket,
            live,
            staged,
            self._copier.mark(),
            meta,
            self.binding.copied_bytes,
            started,
        )
        run.boundary_seconds = time.monotonic() - started
        reach("capture.begun")
        self._thread.submit(lambda: self._work(run))
        return run

    def _work(self, run: CaptureRun) -> None:
        """Copy, seal, report: the copy thread's part of one run."""
        try:
            record = self._seal(run) if self._copy(run) else None
        except Exception as error:
            logger.warning("capture of snapshot %s failed", run.permit.snapshot, exc_info=True)
            run.stop_reason = run.stop_reason or f"sealing failed: {error!r}"
            record = None
        try:
            if record is None:
                self._abandoned(run, run.stop_reason)
            else:
                self._sealed(run, record)
        finally:
            run.finished.set()

    def _copy(self, run: CaptureRun) -> bool:
        started = time.monotonic()
        complete, reason = False, "the copier stopped"
        try:
            watch = StopWatch(run, lambda: self.revoked(run.permit))
            if self._is_given(run):
                complete = self._copy_items(run, watch)
            else:
                reason = f"its slot was not given in {SLOT_SECONDS:g} s: does the SMP answer?"
        except Exception as error:
            logger.warning("copy of snapshot %s failed", run.permit.snapshot, exc_info=True)
            reason = f"the copy failed: {error!r}"
        good = run.end_copy(started, complete, reason)
        run.ticket.resolve(run.ticket.captured, good)
        run.let_training_go()
        return good

    def _is_given(self, run: CaptureRun) -> bool:
        """Ask for the slot and wait for its header: until then it is an older snapshot's."""
        permit, pause = run.permit, FIRST_LOOK_SECONDS
        until = time.monotonic() + SLOT_SECONDS
        self._begins(permit.snapshot, permit.iteration, permit.slot)
        while not run.stop_reason and time.monotonic() < until:
            with suppress(ArenaCorruptError):  # it is being written
                header = self.arena.slot(permit.slot)
                if (header.state, header.snapshot) == (SlotState.CAPTURING, permit.snapshot):
                    return True
            if self.revoked(permit):
                run.stop("its permit was revoked")
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)
        return False

    def _copy_items(self, run: CaptureRun, should_stop: ShouldStop) -> bool:
        """Copy what the boundary left, then the rest.

        ValueError if the layout has changed, or tensors were given other memory meanwhile.
        """
        bound = self.binding.bind(run.live)
        later = self.binding.later(run.live, bound, run.permit.slot)
        # Apart from what was staged: copiers keep plans with the list.
        staged = run.staged
        if staged and not self._copier.copy(staged, run.mark, should_stop, SharedPieces()):
            return False
        complete = self._copier.copy(later, run.mark, should_stop, run.shared)
        if complete and (moved := bound.moved()):
            raise ValueError(f"{moved} was given other memory while it was copied")
        return complete

    def _seal(self, run: CaptureRun) -> SealedRecord | None:
        permit, slot = run.permit, run.permit.slot
        reach("capture.copied")
        # Whatever ends this seal, the next one does not rely on zeros that it may have overwritten.
        dirty, self._dirty[slot] = self._dirty[slot], None
        record = digest.seal(
            self._regions[slot],
            shard_id=self._shard_id,
            snapshot=permit.snapshot,
            iteration=permit.iteration,
            tensor_bytes=self.binding.layout.tensor_bytes,
            meta=run.meta(),
            layout_hash=self.binding.layout_hash,
            block_bytes=self._block_bytes,
            algorithm=self._algorithm,
            dirty_bytes=dirty,
        )
        self._dirty[slot] = record.used_bytes
        reach("capture.digested")
        if self.revoked(permit):
            run.stop_reason = "its permit was revoked"
            return None
        return record

    def revoked(self, permit: Permit) -> bool:
        """Whether the permit word no longer allows this capture."""
        current = self.arena.permit()
        return current is None or current.snapshot != permit.snapshot or current.revoked

    def close(self, timeout_seconds: float) -> None:
        """Finish what is queued, then let go of the arena.

        ControlPlaneError if the copy thread does not end: the arena then stays mapped.
        """
        if not self._thread.close(timeout_seconds):
            raise ControlPlaneError(
                f"the copy thread did not end within {timeout_seconds:.0f} s; its arena "
                f"{self.arena.path} stays mapped until the process ends"
            )
        self._copier.detach()
        self.binding.release()
        self._regions.clear()
        self.arena.close()
