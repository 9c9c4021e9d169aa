"""One capture between the training thread, which begins it and waits, and the copy thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import torch

from megatron_ft.arena.format import Permit
from megatron_ft.rpc import messages as m
from megatron_ft.trainer.binding import BoundaryFacts, changed_early
from megatron_ft.trainer.copier import CopyItem, ShouldStop
from megatron_ft.trainer.sample import Sample
from megatron_ft.trainer.ticket import Ticket

RETURN_SECONDS = 0.02
"""Longest wait of digests for a training thread to leave its fence."""

Compare = Callable[[Mapping[str, torch.Tensor], ShouldStop], tuple[m.ReplicaDigests, ...]]


@dataclass
class CaptureRun:
    """One capture from the boundary to sealed or abandoned, shared by training and copy thread.

    ``live`` are all tensors of the state; ``staged`` what the boundary left to copy of those
    that forward may change.  ``compare`` takes the digests of ``replicas`` from live tensors.
    ``early`` is set when what may not change before the fence is copied; ``moved`` when nothing
    reads the live tensors any more, whatever the result; ``finished`` when nothing writes to the
    slot any more and the SMP has its report.  ``witness`` and ``samples`` show whether lazily
    copied tensors have changed since the boundary.
    """

    permit: Permit
    ticket: Ticket
    live: Mapping[str, torch.Tensor]
    staged: list[CopyItem]
    mark: Any
    meta: Callable[[], bytes]
    compare: Compare | None = None
    witness: BoundaryFacts | None = None
    samples: Sequence[Sample] = ()
    replicas: tuple[m.ReplicaDigests, ...] = ()
    copied_bytes: int = 0
    boundary_seconds: float = 0.0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    stop_reason: str = ""
    early: Event = field(default_factory=Event)
    moved: Event = field(default_factory=Event)
    finished: Event = field(default_factory=Event)
    _fence_entered: float | None = None
    _fence_left: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)

    def stop(self, reason: str) -> bool:
        """Ask the copy thread to give up; False if all tensors were copied already.

        After True the capture will not be sealed, so its tensors may change at once.
        """
        with self._lock:
            if self.moved.is_set():
                return False
            self.stop_reason = self.stop_reason or reason
            return True

    def wait_moved(self, timeout_seconds: float) -> bool:
        """Wait for the copy; False after the timeout.  All of it counts as this capture's stall."""
        with self._lock:
            self._fence_entered = time.monotonic()
        moved = self.moved.wait(timeout_seconds)
        self._fence_left.set()
        return moved

    def wait_early(self, timeout_seconds: float) -> bool:
        """As ``wait_moved``, for what may not change before the fence; at the boundary."""
        started = time.monotonic()
        arrived = self.early.wait(timeout_seconds)
        self.boundary_seconds += time.monotonic() - started
        return arrived

    def find_changes(self, *, last: bool = False, fenced: bool = False) -> list[str]:
        """Names of tensors that have changed since the boundary; a snapshot not yet sealed is then
        given up.

        torch counts a write when it has been made, and the copy thread may have checked before.  So
        training checks once more where it comes to a fence (``fenced``) or boundary, the
        ``last`` time unless the copy runs on; and the copy thread does before it reports, if
        training has not.
        """
        with self._lock:
            if self.witness is None:
                return []
            changed = self.witness.written() if fenced else self.witness.changed()
            if changed:
                self._give_up(changed_early(changed))
            if last and self.moved.is_set():
                self.witness = None
            return changed

    def give_up(self, reason: str) -> None:
        with self._lock:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if not self.finished.is_set():
            self.stop_reason = self.stop_reason or reason

    def forget(self) -> None:
        with self._lock:
            self.witness, self.samples = None, ()

    def let_training_go(self) -> None:
        """Sleep until a thread that waited for the copy runs again.

        It would wait for a processor, for milliseconds, if this thread continued at once where
        none is free.
        """
        if self._fence_entered is not None:
            self._fence_left.wait(RETURN_SECONDS)

    def end_copy(self, started: float, complete: bool, reason: str) -> bool:
        """The copy that began at ``started`` has ended; True if its bytes are good.

        A stop that came before this moment wins: its caller has continued, and the tensors may
        have changed under the last piece.
        """
        with self._lock:
            now = time.monotonic()
            self.copy_seconds = now - started
            waited = 0.0 if self._fence_entered is None else now - self._fence_entered
            self.stall_seconds = self.boundary_seconds + waited
            if not complete:
                self.stop_reason = self.stop_reason or reason
            # Digests do not need the live tensors: let go of them.
            self.live, self.staged, self.mark, self.compare = {}, [], None, None
            self.early.set()
            self.moved.set()
            return not self.stop_reason
