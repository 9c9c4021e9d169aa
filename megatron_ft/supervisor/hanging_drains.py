"""Drains that were killed and do not end: the kernel holds them, as their disk does not answer."""

from __future__ import annotations

import time
from collections.abc import Collection

from megatron_ft.supervisor.events import Observers

REPORT_SECONDS = 1.0
"""A drain is reported that was killed so long ago; most need some moments to end."""


class HangingDrains:
    """Take the nodes' heartbeats about such drains; those that stay are reported once."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._since: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()

    def on(self, nodes: Collection[str]) -> list[str]:
        """The drains on these nodes, each with its node."""
        return [f"{name} on {node}" for node, name in sorted(self._since) if node in nodes]

    def note(self, node: str, drains: Collection[str]) -> None:
        """Take what hangs on a node now."""
        now = time.monotonic()
        present = {(node, name) for name in drains}
        ended = {key for key in self._since if key[0] == node} - present
        for key in ended:
            del self._since[key]
        for key in sorted(present):
            since = self._since.setdefault(key, now)
            if key not in self._reported and now - since >= REPORT_SECONDS:
                self._reported.add(key)
                self._report(*key)
        if over := sorted(name for _, name in ended & self._reported):
            self._reported -= ended
            text = f"{', '.join(over)} on {node} has ended: its disk answers again"
            self._observers.emit("drain_hang_over", text, node=node)

    def _report(self, node: str, name: str) -> None:
        text = (
            f"{name} on {node} was killed and does not end: its disk does not answer. It only "
            "reads memory, so the job continues with what memory has; no drain begins before it "
            "has ended"
        )
        self._observers.emit("drain_hangs", text, node=node)
