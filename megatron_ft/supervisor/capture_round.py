"""What the trainers still owe for one snapshot: seals, verdicts, and the end of their writing."""

from __future__ import annotations

from collections.abc import Iterable


class CaptureRound:
    """Which shards of a permitted snapshot are done with; reports may come in any order.

    ``unsealed`` are shards that are not captured completely.  ``writing`` are those whose trainer
    may still write to its slot, whatever has become of the snapshot meanwhile.
    """

    def __init__(self, shards: Iterable[str]) -> None:
        self.unsealed = set(shards)
        self.writing = set(self.unsealed)
        self._unjudged: set[str] = set()
        self._judged: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every shard is sealed, and judged where its loss is seen only later."""
        return self.all_sealed() and not self._unjudged

    @property
    def owing(self) -> set[str]:
        """Shards that have not sealed, or whose loss is not judged yet."""
        return self.unsealed | self._unjudged

    def all_sealed(self) -> bool:
        """Whether no shard is still being captured: only then may encoding start."""
        return not self.unsealed

    def sealed(self, shard_id: str, *, judged_later: bool) -> None:
        """A shard is captured; with ``judged_later`` its rank waits for the next loss."""
        self.unsealed.discard(shard_id)
        if judged_later and shard_id not in self._judged:
            self._unjudged.add(shard_id)

    def passed(self, shard_id: str) -> None:
        """The loss gate lets a shard pass: it may say so before the rank says that it sealed."""
        self._judged.add(shard_id)
        self._unjudged.discard(shard_id)

    def stopped(self, shard_id: str) -> None:
        """The trainer writes to its slot no more."""
        self.writing.discard(shard_id)
