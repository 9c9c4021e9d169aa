"""The coordinator's connection to one SMP: requests with answers, and events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import zmq.asyncio

from megatron_ft.coordinator.inbox import Inbox
from megatron_ft.errors import ArenaMemoryError, ControlPlaneError, NoRoomError
from megatron_ft.smp import messages as m
from megatron_ft.smp.request_link import RequestLink
from megatron_ft.smp.security import JobKeys

log = logging.getLogger(__name__)

EventCallback = Callable[[m.Event], None]

ARENA_TIMEOUT_SECONDS = 600.0
"""For making an arena, whose pages are all touched."""


class SmpLink(RequestLink):
    """A connection that also brings what the SMP tells unasked.

    ``clock`` is the newest time of the node's own clock that a heartbeat has brought, 0 before
    the first, ``summary`` the digests of the parts of the job's summary that the node has.
    ``peers`` are the connections to all nodes by name, since a relay brings reports of others.
    ``inbox`` is that of an earlier connection to the node, since its SMP may be the same.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        node: str,
        endpoint: str,
        keys: JobKeys,
        on_event: EventCallback,
        peers: Mapping[str, SmpLink] | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        super().__init__(context, node, endpoint, keys)
        self.clock = 0.0
        self.summary: dict[str, bytes] = {}
        self.inbox = inbox or Inbox()
        self._on_event, self._peers = on_event, {} if peers is None else peers

    async def make_arena(self, request: m.CreateArena) -> None:
        """Have the node make an arena or check the one it has; NoRoomError if it has no room."""
        try:
            await self.demand(request, ARENA_TIMEOUT_SECONDS)
        except ArenaMemoryError as error:
            raise NoRoomError(f"{self.node}: {error}", self.node) from error

    def _hear(self, report: m.Event | m.Gathered) -> None:
        if isinstance(report, m.Event):
            self._tell(self.inbox.direct(report))
            return
        for frame in report.frames:
            event = self._event(frame)
            if event is not None and event.node in self._peers:
                self._tell(self._peers[event.node].inbox.relayed(event))

    def _tell(self, events: list[m.Event]) -> None:
        for event in events:
            self._on_event(event)

    def _event(self, frame: bytes) -> m.Event | None:
        """What a relay has brought, if it is what it should be."""
        try:
            event = m.decode(frame)
        except ControlPlaneError as error:
            log.error("through node %s: %s", self.node, error)
            return None
        return event if isinstance(event, m.Event) else None
