"""Summary of the job for ``megatron-ft status``: what failures fall back to, and skipped snapshots.

The coordinator has every SMP keep it.  It is in parts, by how often they change, and a heartbeat
brings a node those that it lacks: an iteration's number nearly always, the names of all nodes
when one was replaced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.rpc.job_messages import MADE, summary_digest


class SummaryParts:
    """Encoded parts of a job's summary, made anew from ``view`` at most every ``seconds``.

    What they cost grows with the job, and each of its nodes has a heartbeat of its own.  So they
    are made less often where they take more than a twentieth of the time.

    The part MADE counts the changes: of two nodes, the one with the higher count knows more.
    """

    def __init__(self, view: Callable[[], Mapping[str, Any]], seconds: float) -> None:
        self._view, self._seconds = view, seconds
        self._until = 0.0
        self._parts: dict[str, tuple[bytes, bytes]] = {}
        self._seen: dict[str, bytes] = {}
        self._made = 0

    def unknown_to(self, held: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those parts that a node lacks; ``held`` are the digests of those that it has."""
        began = time.monotonic()
        if began >= self._until:
            parts = {name: json.dumps(part).encode() for name, part in self._view().items()}
            if parts != self._seen:
                self._seen, self._made = parts, self._made + 1
            parts = {**parts, MADE: json.dumps({MADE: self._made}).encode()}
            self._parts = {name: (summary_digest(part), part) for name, part in parts.items()}
            taken = time.monotonic() - began
            self._until = began + max(self._seconds, 20 * taken)
        return {k: part for k, (known, part) in self._parts.items() if held.get(k) != known}


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
