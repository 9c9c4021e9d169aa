"""The coordinator's connection to one SMP: requests with answers, and events."""

from __future__ import annotations

from collections.abc import Callable

import zmq.asyncio

from megatron_ft.errors import ArenaMemoryError, NoRoomError
from megatron_ft.smp import messages as m
from megatron_ft.smp.reports import reported
from megatron_ft.smp.request_link import RequestLink
from megatron_ft.smp.security import JobKeys

EventCallback = Callable[[m.Event], None]

ARENA_TIMEOUT_SECONDS = 600.0
"""For making an arena, whose pages are all touched."""


class SmpLink(RequestLink):
    """A connection that also brings what the SMP tells unasked.

    ``clock`` is the newest time of the node's own clock that a heartbeat has brought, 0 before
    the first, ``summary`` the digests of the parts of the job's summary that the node has.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        node: str,
        endpoint: str,
        keys: JobKeys,
        on_event: EventCallback,
    ) -> None:
        super().__init__(context, node, endpoint, keys)
        self.clock = 0.0
        self.summary: dict[str, bytes] = {}
        self._on_event = on_event

    async def make_arena(self, request: m.CreateArena) -> None:
        """Have the node make an arena or check the one it has; NoRoomError if it has no room."""
        try:
            await self.demand(request, ARENA_TIMEOUT_SECONDS)
        except ArenaMemoryError as error:
            raise NoRoomError(f"{self.node}: {error}", self.node) from error

    def _hear(self, event: m.Event) -> None:
        for one in reported(event):
            self._on_event(one)
