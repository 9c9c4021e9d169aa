"""Counting the snapshots that were due while readers held the slots for them.  Pure."""

from __future__ import annotations


class Skips:
    """``total`` counts over the whole job; progress is the fastest trainer's iteration."""

    def __init__(self) -> None:
        self.total = 0
        self._since: int | None = None

    def begin(self, progress: int) -> bool:
        """A snapshot could not be permitted.  True if this starts a period of skipping."""
        started = self._since is None
        if self._since is None:
            self._since = progress
        return started

    def end(self, progress: int, interval: int) -> int | None:
        """Snapshots are permitted again: how many were due meanwhile, None if none were held."""
        if self._since is None:
            return None
        skipped = max(0, progress // interval - self._since // interval)
        self.total += skipped
        self._since = None
        return skipped
