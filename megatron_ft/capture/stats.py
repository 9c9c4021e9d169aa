"""What a trainer's snapshots have cost so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CaptureStats:
    """Counters of one SnapshotManager, since it was made.

    ``taken`` counts sealed snapshots, ``skipped`` calls of save() that captured
    nothing, ``missed`` permits whose iteration passed uncaptured, ``abandoned``
    captures that ended without a result.  ``stall_seconds`` is the time the training
    thread spent in save() while capturing and in fences; ``copied_bytes`` counts
    tensor bytes of sealed snapshots.
    """

    taken: int = 0
    skipped: int = 0
    missed: int = 0
    abandoned: int = 0
    stall_seconds: float = 0.0
    copied_bytes: int = 0
