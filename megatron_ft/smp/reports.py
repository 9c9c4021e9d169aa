"""One report for all ranks of a node: what one rank's word waits for.  Pure.

The coordinator goes on only when *all* ranks have sealed and been judged, or been encoded. So
the word of one of a node's ranks waits there for those of the others, and all of them leave as one
message, in the order in which they were said.  Anything else (a capture that was missed,
a writer that has died) leaves at once, and takes along what was said before it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m

MOST_LOOKS = 10
"""Heartbeats after which a word waits no longer, should the others never be said."""


class Reports:
    """Events of one SMP on their way to its coordinator."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.snapshot: SnapshotId | None = None
        self.sealed: set[str] = set()
        self.unjudged: set[str] = set()
        self.judged: set[str] = set()
        self._looks = 0

    def tell(self, body: Any, shards: Collection[str]) -> list[Any]:
        """Events that leave now because of ``body``, oldest first; ``shards`` are the node's."""
        self.waiting.append(body)
        return [] if self._waits(body, shards) else self.take()

    def look(self) -> list[Any]:
        """A heartbeat: events that have waited too long."""
        self._looks += 1 if self.waiting else 0
        return self.take() if self._looks >= MOST_LOOKS else []

    def take(self) -> list[Any]:
        """All that waits."""
        taken, self.waiting, self._looks = self.waiting, [], 0
        return taken

    def _waits(self, body: Any, shards: Collection[str]) -> bool:
        if isinstance(body, m.CaptureCost | m.Encoded):
            return True  # Sealed and OrderDone come after them
        if not self._note(body):
            return False
        return not (self.sealed >= set(shards) and self.unjudged <= self.judged)

    def _note(self, body: Any) -> bool:
        """Whether it is a word that waits for those of other ranks on the newest snapshot."""
        if isinstance(body, m.Sealed) and self._begin(body.record.snapshot):
            self.sealed.add(body.record.shard_id)
            self.unjudged |= {body.record.shard_id} if body.judged_later else set()
            return True
        if isinstance(body, m.Judged) and not body.problem and self._begin(body.snapshot):
            self.judged.add(body.shard_id)
            return True
        return False

    def _begin(self, snapshot: SnapshotId) -> bool:
        """There is one snapshot at a time: what was said of another counts no more."""
        if self.snapshot is None or snapshot > self.snapshot:
            self.snapshot = snapshot
            self.sealed, self.unjudged, self.judged = set(), set(), set()
        return snapshot == self.snapshot


def snapshot_of(bodies: list[Any]) -> SnapshotId | None:
    """The snapshot of which these are a node's report on one round; None if they are not."""
    last = bodies[-1] if bodies else None
    if isinstance(last, m.Sealed):
        return last.record.snapshot
    if isinstance(last, m.OrderDone) or (isinstance(last, m.Judged) and not last.problem):
        return last.snapshot
    return None
