"""Nodes that cannot be reached may train until their leases have run out."""

from __future__ import annotations

import time
from collections.abc import Sequence


class OutstandingLeases:
    """When the leases of nodes that were given up must have run out.

    A node's lease counts from when it was last heard of; before this supervisor heard of it,
    from when this supervisor began, since the one before may have renewed it until then.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds`` is longer than any lease."""
        self._seconds, self._began = seconds, time.monotonic()
        self._heard: dict[str, float] = {}

    def note(self, node: str, heard: float) -> None:
        """The node is given up; it was last heard of then, on the monotonic clock."""
        self._heard[node] = heard

    def left(self, nodes: Sequence[str]) -> float:
        """Seconds until all of them have run out; below zero if they have."""
        last = max((self._heard.get(node, self._began) for node in nodes), default=0.0)
        return last + self._seconds - time.monotonic()
