"""Counting the snapshots that were due while there was no slot for them.  Pure."""

from __future__ import annotations


class Skips:
    """``total`` counts over the whole job, without those of the present period of skipping.

    These are ``now``, as of the last ``begin``.  Progress is the fastest trainer's iteration.
    """

    def __init__(self) -> None:
        self.total = self.now = 0
        self._since: int | None = None

    def begin(self, progress: int, interval: int) -> bool:
        """A snapshot could not be permitted.  True if this starts a period of skipping."""
        started = self._since is None
        if self._since is None:
            self._since = progress
        self.now = max(0, progress // interval - self._since // interval)
        return started

    def end(self, progress: int, interval: int) -> int | None:
        """Snapshots are permitted again: how many were due meanwhile, None if none were held."""
        if self._since is None:
            return None
        skipped = max(0, progress // interval - self._since // interval)
        self.total += skipped
        self._since, self.now = None, 0
        return skipped
