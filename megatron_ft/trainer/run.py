"""One capture, from the boundary to sealed or abandoned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import torch

from megatron_ft.arena.format import Permit
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.shared_pieces import SharedPieces
from megatron_ft.trainer.threads import spare_threads
from megatron_ft.trainer.ticket import Ticket

PERMIT_CHECK_SECONDS = 0.05
"""How often a running copy looks whether its permit was revoked: a read costs microseconds."""

RETURN_SECONDS = 0.02
"""So long digests wait at most until a training thread has left its fence."""


@dataclass
class CaptureRun:
    """What the training thread hands to the copy thread, and what both look at.

    ``live`` are all tensors of the state; ``staged`` what the boundary left to copy of those
    that forward may change.
    ``moved`` is set when nothing reads the live tensors any more, whatever the result;
    ``finished`` when nothing writes to the slot any more and the SMP was told.
    ``began`` is the monotonic time at which training was first held for it.
    """

    permit: Permit
    ticket: Ticket
    live: Mapping[str, torch.Tensor]
    staged: list[CopyItem]
    mark: Any
    meta: Callable[[], bytes]
    copied_bytes: int = 0
    began: float = 0.0
    boundary_seconds: float = 0.0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    stop_reason: str = ""
    shared: SharedPieces = field(default_factory=SharedPieces)
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
        """Wait for the copy, and help with it where this rank has more than one core.

        False after the timeout, which may be the copy of one piece longer then.  All of it counts
        as this capture's stall.
        """
        with self._lock:
            self._fence_entered = time.monotonic()
        until = self._fence_entered + timeout_seconds
        if not self.moved.is_set() and spare_threads() > 1:
            self.shared.help(until)
        moved = self.moved.wait(max(0.0, until - time.monotonic()))
        self._fence_left.set()
        return moved

    def let_training_go(self) -> None:
        """Sleep until a thread that waited for the copy runs again.

        It would wait for a processor, for milliseconds, if this thread went on at once where
        there is none to spare.
        """
        if self._fence_entered is not None:
            self._fence_left.wait(RETURN_SECONDS)

    def end_copy(self, started: float, complete: bool, reason: str) -> bool:
        """The copy that began at ``started`` has ended; True if its bytes are good.

        A stop that came before this moment wins: whoever asked for it has gone on, and
        the tensors may have changed under the last piece.
        """
        with self._lock:
            now = time.monotonic()
            self.copy_seconds = now - started
            waited = 0.0 if self._fence_entered is None else now - self._fence_entered
            self.stall_seconds = self.boundary_seconds + waited
            if not complete:
                self.stop_reason = self.stop_reason or reason
            # Digests do not need the live tensors: let go of them.
            self.live, self.staged, self.mark = {}, [], None
            self.moved.set()
            self.shared.withdraw()
            return not self.stop_reason


class StopWatch:
    """Tells a copier when to stop: the run was asked to, or its permit was revoked.

    The permit is looked up at most every PERMIT_CHECK_SECONDS.
    """

    def __init__(self, run: CaptureRun, revoked: Callable[[], bool]) -> None:
        """``revoked`` reads the permit word."""
        self._run = run
        self._revoked = revoked
        self._next_look = 0.0

    def __call__(self) -> bool:
        """True when the copy should stop now."""
        now = time.monotonic()
        if not self._run.stop_reason and now >= self._next_look:
            self._next_look = now + PERMIT_CHECK_SECONDS
            if self._revoked():
                self._run.stop("its permit was revoked")
        return bool(self._run.stop_reason)
