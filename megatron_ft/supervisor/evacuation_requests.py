"""Requests to move the ranks of a node elsewhere, and what became of them.

Users ask an SMP, an SMP that is to end asks by itself, and the health check asks here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from megatron_ft.rpc import messages as m


class EvacuationRequests:
    """``waiting`` are those that nobody has answered yet, by their numbers.

    ``moves`` tells for each node what became of the last request, for status.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, m.Evacuate] = {}
        self.moves: dict[str, dict[str, Any]] = {}
        self._known: set[str] = set()
        self._asked = asyncio.Event()

    def ask(self, request: m.Evacuate) -> None:
        """Take a request, unless it came before: every heartbeat brings it again."""
        if request.number not in self._known:
            self._known.add(request.number)
            self.waiting[request.number] = request
            self._asked.set()

    async def until_asked(self, seconds: float) -> bool:
        """Wait for a request for up to ``seconds``; True if there is one."""
        if not self.waiting:
            self._asked.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), seconds)
        return bool(self.waiting)

    def answer(self, number: str) -> None:
        """Drop a request that was carried out or refused."""
        self.waiting.pop(number, None)

    def note_move(self, node: str, **what: Any) -> None:
        """Record what became of a node that was to be evacuated."""
        self.moves[node] = what
