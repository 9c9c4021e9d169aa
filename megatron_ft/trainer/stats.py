"""What a trainer's snapshots have cost so far, and how safe they are."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = -1
"""In place of an iteration: there is no such snapshot."""


@dataclass(frozen=True)
class LastCapture:
    """One sealed capture: its iteration, the seconds from the iteration's end until all bytes and
    digests were in the arena, those of them that the training thread was held, tensor bytes."""

    iteration: int = NEVER
    seconds: float = 0.0
    stall_seconds: float = 0.0
    copied_bytes: int = 0


@dataclass
class CaptureStats:
    """Counters of one SnapshotManager, since it was made.

    ``taken`` counts sealed snapshots, ``skipped`` calls of save() that captured
    nothing, ``due_skipped`` those of them at a multiple of the snapshot interval,
    ``missed`` permits whose iteration passed uncaptured, ``abandoned``
    captures that ended without a result, ``gated`` snapshots that this rank's loss gate
    has refused.  ``stall_seconds`` is the time the training
    thread spent in save() while capturing and in fences; ``copied_bytes`` counts
    tensor bytes of sealed snapshots.

    ``committed_iteration`` is the newest that the job has told this rank of, or that it has
    restored; ``protected_iteration`` the newest committed with parity; NEVER before the first.
    Written by several threads, one writer a field: read without a lock, a moment late.
    """

    taken: int = 0
    skipped: int = 0
    due_skipped: int = 0
    missed: int = 0
    abandoned: int = 0
    gated: int = 0
    stall_seconds: float = 0.0
    copied_bytes: int = 0
    last: LastCapture = LastCapture()
    protected_iteration: int = NEVER
    committed_iteration: int = NEVER

    def committed(self, iteration: int, protected: bool) -> None:
        """Take note that a snapshot is committed, at level "protected" or "local"."""
        self.committed_iteration = max(self.committed_iteration, iteration)
        if protected:
            self.protected_iteration = max(self.protected_iteration, iteration)
