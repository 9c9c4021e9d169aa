"""What a relay has of its branch's reports on one round of a snapshot.  Pure.

Reports go up the way on which the request came down.  The coordinator goes on only when it
has those of all nodes, so a relay may wait for the last of its branch, and sends what it has as
one message; what is missing longer than others should wait comes after it.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m

HOLD_SECONDS = 0.25
"""So long a report waits at one relay for those of the others."""


class Gathering:
    """``above`` is who passed the newest request on, ``missing`` who has not reported on it."""

    def __init__(self) -> None:
        self.above = b""
        self.snapshot: SnapshotId | None = None
        self.missing: set[str] = set()
        self.frames: list[bytes] = []
        self._newest: SnapshotId | None = None

    def begin(self, snapshot: SnapshotId, above: bytes, nodes: Collection[str]) -> None:
        """A Grant or Encode came from ``above``; reports of ``nodes``, ours with them, follow."""
        if self._newest is None or snapshot >= self._newest:
            self.above, self.snapshot, self._newest = above, snapshot, snapshot
            self.missing = set(nodes)

    def end(self) -> None:
        """Our own reports go to the coordinator: it has asked us itself, or the round is over."""
        self.snapshot = None

    def takes(self, snapshot: SnapshotId | None) -> bool:
        """Whether our own report on this snapshot, if it is on one, goes this way."""
        return snapshot is not None and snapshot == self.snapshot

    def add(self, report: m.Gathered) -> bool:
        """Take a report of our branch; whether nothing is missing now."""
        self.frames += report.frames
        if report.whole and report.snapshot == self.snapshot:
            self.missing.discard(report.node)
        return not self.missing or report.snapshot != self.snapshot

    def take(self, node: str, incarnation: int) -> m.Gathered | None:
        """The message of our ``node`` for who is above, if there is anything to say."""
        frames, self.frames = tuple(self.frames), []
        snapshot = self.snapshot or self._newest
        if not frames or snapshot is None:
            return None
        return m.Gathered(incarnation, node, snapshot, not self.missing, frames)
