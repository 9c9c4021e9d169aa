"""One trainer's mapped arena, its copier and its copy thread: how a capture is carried out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Permit
from megatron_ft.capture.binding import LayoutBinding, layout_changed
from megatron_ft.capture.copier import Copier, CopyItem
from megatron_ft.capture.run import CaptureRun, StopWatch
from megatron_ft.capture.ticket import Ticket
from megatron_ft.capture.worker import CopyThread
from megatron_ft.errors import ArenaForeignError, ControlPlaneError
from megatron_ft.fault_points import reach
from megatron_ft.identity import SealedRecord
from megatron_ft.shard import ShardLayout

logger = logging.getLogger(__name__)

START_SECONDS = 60.0

Sealed = Callable[[CaptureRun, SealedRecord], None]
Abandoned = Callable[[CaptureRun, str], None]


class CaptureEngine:
    """Carries out captures into one arena, one at a time.

    ``sealed`` and ``abandoned`` are called in the copy thread; exactly one of them per
    run, and only when nothing writes to the slot any more.
    """

    def __init__(
        self,
        path: Path,
        shard_id: str,
        layout: ShardLayout,
        copier: Copier,
        sealed: Sealed,
        abandoned: Abandoned,
    ) -> None:
        """Map the arena at ``path`` and start the copy thread; nothing is kept on an error."""
        self._shard_id = shard_id
        self._copier = copier
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
        now, _ = self.binding.items(live, permit.slot)
        staged = self._copier.stage(now)
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
            complete = self._copier.copy(self._items(run), run.mark, watch, run.shared)
        except Exception as error:
            logger.warning("copy of snapshot %s failed", run.permit.snapshot, exc_info=True)
            reason = f"the copy failed: {error!r}"
        good = run.end_copy(started, complete, reason)
        run.ticket.resolve(run.ticket.captured, good)
        run.let_training_go()
        return good

    def _items(self, run: CaptureRun) -> list[CopyItem]:
        """What is left to copy; ValueError if the state no longer fits the layout."""
        mismatch = self.binding.settle(run.live)
        if mismatch:
            raise ValueError(layout_changed(mismatch))
        _, later = self.binding.items(run.live, run.permit.slot)
        # As it is where it can be: copiers keep plans with the list.
        return run.staged + later if run.staged else later

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
