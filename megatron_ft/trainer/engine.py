"""One trainer's mapped arena, its copier and its copy thread: how a capture is carried out."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.arena.format import Permit, SlotState
from megatron_ft.core import copy_crc
from megatron_ft.core.errors import (
    ArenaCorruptError,
    ArenaForeignError,
    ConfigError,
    ControlPlaneError,
)
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.shard import ShardLayout, pack_meta, plan_layout
from megatron_ft.trainer.binding import LayoutBinding, changed_early
from megatron_ft.trainer.capture_run import CaptureRun, Compare
from megatron_ft.trainer.copier import Copier, ShouldStop, ranges
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.state import TrainingState, live_tensors
from megatron_ft.trainer.ticket import Ticket

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
SLOT_SECONDS = 1.0
"""Longest time for the SMP to give the slot; then the capture is abandoned."""

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.0001, 0.005
"""First and longest time between two reads of the slot's header."""

META_SPARE_BYTES = 65536
"""Room for small objects to grow beyond twice their first size."""

PLANNING_BLOCK_BYTES = 65536
"""The digest table is planned for blocks of this size, the shortest that releases gave to arenas;
longer ones need less."""

PERMIT_CHECK_SECONDS = 0.05
"""Interval at which a running copy reads its permit: a read costs microseconds."""

MEMORY_LOOK_SECONDS = 0.1
"""Interval of checks for the memory of further slots, which the SMP makes."""


def required_bytes(layout: ShardLayout, objects: dict[str, Any], form: bytes) -> int:
    """Bytes of a data slot for this layout, with room for its small objects to grow.

    UnencodableError names an object that cannot be stored.
    """
    return with_spare(layout.tensor_bytes, len(pack_meta(layout.to_bytes(), objects, form)))


def with_spare(tensor_bytes: int, meta_bytes: int) -> int:
    """Bytes of a data slot for such a shard, with room for the small objects to grow."""
    capacity = 2 * meta_bytes + META_SPARE_BYTES
    return digest.required_bytes(tensor_bytes, capacity, PLANNING_BLOCK_BYTES)


def choose_copier(state: TrainingState, threads: int = 0) -> Copier:
    """The copier for where the tensors are; a CUDA one also takes host tensors.

    ``threads`` digest what comes from a device; 0: by the machine.

    ConfigError if they are on several devices: copies wait for one of them alone.
    """
    live = live_tensors(state)
    devices = {tensor.get_device(): name for name, tensor in live.items() if tensor.is_cuda}
    if not devices:
        return CpuCopier()
    if len(devices) > 1:
        places = ", ".join(f"{name} on cuda:{device}" for device, name in sorted(devices.items()))
        raise ConfigError(
            f"the tensors of one rank are on {len(devices)} devices ({places}): snapshots are "
            "taken of one device a rank; start one rank for each"
        )
    from megatron_ft.trainer.cuda import CudaCopier

    (device,) = devices
    return CudaCopier(device, threads=threads)


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
            logger.exception("the copy thread could not be set up; it continues with defaults")
        self._ready.set()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a capture failed in an unexpected place")
            del job


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
        self._closed = threading.Event()
        self.arena = Arena.open(path)
        try:
            self._bind(layout)
            self._thread = CopyThread(copier.enter_thread, START_SECONDS)
        except BaseException:
            self.arena.close()
            raise
        self._watch = threading.Thread(
            target=self._attach_later, name="megatron-ft-memory", daemon=True
        )
        if self._later:
            self._watch.start()

    def _bind(self, layout: ShardLayout) -> None:
        header = self.arena.header
        if header.shard_id != self._shard_id:
            raise ArenaForeignError(
                f"{self.arena.path} is the arena of {header.shard_id}, not of {self._shard_id}: "
                "give every rank a shard id of its own"
            )
        self._block_bytes = header.geometry.block_bytes
        slots = list(range(header.geometry.slot_count))
        self._regions = [self.arena.data(slot, writable=True) for slot in slots]
        # A restart finds the arena of the snapshot, which the state may have outgrown since.
        fits = layout.tensor_bytes <= header.geometry.data_bytes
        self.binding = LayoutBinding(layout if fits else plan_layout(()), self._regions)
        self._later = slots[1:] if self.arena.holes else []
        self._attach(slots[: len(slots) - len(self._later)])

    def lacking(self, tensor_bytes: int, meta_bytes: int) -> int:
        """Bytes that a slot lacks for such a shard; 0 if it has room."""
        needed = digest.required_bytes(tensor_bytes, meta_bytes, self._block_bytes)
        return max(0, needed - self.arena.geometry.data_bytes)

    def rebind(self, layout: ShardLayout, before: LayoutBinding) -> None:
        """Capture this layout from here on; a slot has room for it, and no capture is running.

        What was learned of the tensors ``before`` holds for those that are left.
        """
        self.binding.release()
        self.binding = LayoutBinding(layout, self._regions, thorough=before.seen_late)
        self.binding.hurry_like(before)

    def _attach(self, slots: list[int], *, resting: bool = False) -> None:
        """Make these slots, which have memory, ready for copies.

        ``resting`` leaves half of the time to training, and ends when this engine is closed.
        """
        for slot in slots:
            region = self._regions[slot]
            for start, stop in ranges(region.ctypes.data, region.nbytes):
                began = time.monotonic()
                self.arena.prefault(slot, start, stop)
                self._copier.attach(region[start:stop])
                if resting and self._closed.wait(time.monotonic() - began):
                    return

    def _attach_later(self) -> None:
        """Wait until the SMP has made the memory of the other slots; its grants wait for it, too.

        A slot that is granted first serves as well: its pages are mapped as they are written, and
        copies into ranges that are not page-locked yet are slower.
        """
        self._copier.enter_thread()
        while not self._closed.wait(MEMORY_LOOK_SECONDS):
            if not self.arena.holes:
                return self._attach(self._later, resting=True)

    def start(
        self,
        permit: Permit,
        ticket: Ticket,
        live: Mapping[str, torch.Tensor],
        meta: Callable[[], bytes],
        started: float,
        compare: Compare | None = None,
        wrapped: Mapping[str, torch.Tensor] | None = None,
    ) -> CaptureRun:
        """Secure what may change at once and start the copy of the rest.

        ``meta`` gives what lies behind the tensors, in the copy thread, and ``compare`` the digests
        of replicas.  ``started`` is the monotonic time since when training has been held.
        ``wrapped`` is as in ``LayoutBinding.witness``.  An exception leaves nothing behind that
        writes to the slot.
        """
        reach("capture.permitted")
        witness = self.binding.witness(live, wrapped or {})
        samples = self.binding.sampler.samples(live)
        staged = self._copier.stage(self.binding.at_boundary(live, permit.slot))
        run = CaptureRun(
            permit,
            ticket,
            live,
            staged,
            self._copier.mark(),
            meta,
            compare,
            witness,
            samples,
            copied_bytes=self.binding.copied_bytes,
        )
        run.boundary_seconds = time.monotonic() - started
        reach("capture.begun")
        self._thread.submit(lambda: self._work(run))
        return run

    def _arrivals(self, slot: int) -> Arrivals | None:
        """Digests of a slot that is about to be filled; None where they are a pass of their own."""
        library = copy_crc.load()
        if library is None:
            return None
        return Arrivals(library, self._regions[slot], self._block_bytes, self._copier.pool)

    def _work(self, run: CaptureRun) -> None:
        """Copy, seal, report: the copy thread's part of one run."""
        arrivals = self._arrivals(run.permit.slot)
        try:
            record = self._seal(run, arrivals) if self._copy(run, arrivals) else None
        except Exception as error:
            logger.warning("capture of snapshot %s failed", run.permit.snapshot, exc_info=True)
            run.stop_reason = run.stop_reason or f"sealing failed: {error!r}"
            record = None
        if arrivals is not None:
            arrivals.settle()
        try:
            if record is None:
                self._abandoned(run, run.stop_reason)
            else:
                self._sealed(run, record)
        finally:
            run.finished.set()

    def _copy(self, run: CaptureRun, arrivals: Arrivals | None) -> bool:
        started = time.monotonic()
        try:
            if self._is_given(run):
                reason = self._copy_items(run, arrivals)
                if not reason:
                    self._take_replicas(run)
            else:
                reason = f"its slot was not given in {SLOT_SECONDS:g} s: does the SMP answer?"
        except Exception as error:
            reason = f"the copy failed: {error!r}"
            # A tensor that was given other memory meanwhile is refused by copiers, too.
            if self._changed(run):
                reason = run.stop_reason
            else:
                logger.warning("copy of snapshot %s failed", run.permit.snapshot, exc_info=True)
        good = run.end_copy(started, not reason, reason)
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

    def _take_replicas(self, run: CaptureRun) -> None:
        """Take the digests of replicas; what fails there costs a comparison and nothing else."""
        if run.compare is None or run.stop_reason:
            return
        try:
            with self._copier.after(run.mark):
                run.replicas = run.compare(run.live, self._should_stop(run))
        except Exception:
            text = "replicas are not compared in snapshot %s"
            logger.warning(text, run.permit.snapshot, exc_info=True)

    def _should_stop(self, run: CaptureRun) -> ShouldStop:
        """A function that is true once the run must stop; it reads the permit at times."""
        next_look = 0.0

        def should_stop() -> bool:
            nonlocal next_look
            now = time.monotonic()
            if not run.stop_reason and now >= next_look:
                next_look = now + PERMIT_CHECK_SECONDS
                if self.revoked(run.permit):
                    run.stop("its permit was revoked")
            return bool(run.stop_reason)

        return should_stop

    def _copy_items(self, run: CaptureRun, arrivals: Arrivals | None) -> str:
        """Copy what the boundary left, then the rest; the reason why the bytes are not good, or ''.

        ValueError if the layout has changed, or a tensor was given other memory meanwhile.
        """
        should_stop = self._should_stop(run)
        if self._changed(run):
            return run.stop_reason
        bound = self.binding.bind(run.live)
        early, later = self.binding.later(run.live, bound, run.permit.slot)
        if arrivals is not None:
            arrivals.clear(self.binding.gaps)
        samples = [sample.item for sample in run.samples]
        # Apart from what was staged: copiers keep plans with the lists.
        for items in (samples, run.staged, early, later):
            beside = None if items is samples else arrivals
            if items and not self._copier.copy(items, run.mark, should_stop, beside):
                return "the copier stopped"
            if items is early:
                run.early.set()
        if self._changed(run):
            return run.stop_reason
        moved = self.binding.lazy_of(bound.changed())
        return changed_early(moved) if moved else self._miscaptured(run)

    def _changed(self, run: CaptureRun) -> bool:
        """True if lazily copied tensors have changed; those are copied early from now on."""
        if changed := run.find_changes():
            self.binding.hurry(changed)
        return bool(changed)

    def _miscaptured(self, run: CaptureRun) -> str:
        """The reason why the sample shows other bytes than those of the boundary, or ''.

        torch has not counted such a write, so nothing is left to the time after the boundary then.
        """
        self.binding.sampler.draw(run.live)
        region = self._regions[run.permit.slot]
        wrong = [name for sample in run.samples for name in sample.miscaptured(region)]
        if wrong:
            self.binding.hurry()
        return changed_early(sorted({*wrong})) if wrong else ""

    def _seal(self, run: CaptureRun, arrivals: Arrivals | None) -> SealedRecord | None:
        permit, slot = run.permit, run.permit.slot
        reach("capture.copied")
        record = digest.seal(
            self._regions[slot],
            shard_id=self._shard_id,
            snapshot=permit.snapshot,
            iteration=permit.iteration,
            tensor_bytes=self.binding.layout.tensor_bytes,
            meta=run.meta(),
            layout_hash=self.binding.layout_hash,
            block_bytes=self._block_bytes,
            arrivals=arrivals,
            pool=self._copier.pool,
        )
        reach("capture.digested")
        self._changed(run)
        if self.revoked(permit):
            run.stop_reason = run.stop_reason or "its permit was revoked"
        return None if run.stop_reason else record

    def revoked(self, permit: Permit) -> bool:
        """True if the permit no longer allows this capture."""
        current = self.arena.permit()
        return current is None or current.snapshot != permit.snapshot or current.revoked

    def close(self, timeout_seconds: float) -> None:
        """Finish what is queued, then let go of the arena.

        ControlPlaneError if the copy thread does not end: the arena then stays mapped.
        """
        self._closed.set()
        if self._later:
            self._watch.join()
        if not self._thread.close(timeout_seconds):
            raise ControlPlaneError(
                f"the copy thread did not end within {timeout_seconds:.0f} s; its arena "
                f"{self.arena.path} stays mapped until the process ends"
            )
        self._copier.detach()
        self.binding.release()
        self._regions.clear()
        self.arena.close()
