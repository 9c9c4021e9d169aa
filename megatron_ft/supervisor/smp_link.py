"""One connection of the supervisor to the SMP of a node: requests, answers and its events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.core.errors import ArenaMemoryError, ControlPlaneError, NoRoomError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import EventSubscription
from megatron_ft.rpc.sockets import JobKeys

log = logging.getLogger(__name__)

ARENA_TIMEOUT_SECONDS = 600.0
"""Limit for making an arena, whose pages are all touched."""

EventCallback = Callable[[m.NodeEvent], None]


class SmpLink:
    """An authenticated connection to the SMP of ``node``.

    Answers may come in any order, so heartbeats pass a request that takes long.
    ``last_heard`` is the monotonic time of the last frame from there, ``missed`` the number of
    heartbeats since then, ``clock`` the newest time of the node's own clock that a heartbeat has
    brought, 0 before the first.  ``subscription`` is that of an earlier connection to the node,
    since its SMP may be the same.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        node: str,
        endpoint: str,
        keys: JobKeys,
        on_event: EventCallback,
        subscription: EventSubscription | None = None,
    ) -> None:
        self.node, self.endpoint = node, endpoint
        self.last_heard, self.missed = time.monotonic(), 0
        self.clock = 0.0
        self.subscription = subscription or EventSubscription()
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        keys.connect(self._socket, endpoint)
        self._reader = asyncio.create_task(self._read())

    async def ask(self, request: m.Message, timeout: float) -> Any:
        """The answer to a request, Refused included.  ControlPlaneError after ``timeout`` s."""
        if self._socket.closed:
            raise ControlPlaneError(self._given_up())
        number = str(next(self._numbers)).encode()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self._socket.send_multipart([number, m.encode(request)])
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError as error:
            raise ControlPlaneError(
                f"the SMP of node {self.node} ({self.endpoint}) did not answer "
                f"{type(request).__name__} in {timeout:.1f} s"
            ) from error
        finally:
            self._pending.pop(number, None)

    async def demand(self, request: m.Message, timeout: float) -> Any:
        """Like ``ask``, but the error of a Refused is raised."""
        answer = await self.ask(request, timeout)
        if isinstance(answer, m.Refused):
            raise answer.error
        return answer

    async def make_arena(self, request: m.CreateArena) -> None:
        """Have the node make an arena or check the one it has; NoRoomError if it has no room."""
        try:
            await self.demand(request, ARENA_TIMEOUT_SECONDS)
        except ArenaMemoryError as error:
            raise NoRoomError(f"{self.node}: {error}", self.node) from error

    def count_silence(self, since: float) -> None:
        """Count a heartbeat as missed if nothing has come from there since this time."""
        self.missed += self.last_heard < since

    def note_clock(self, clock: float) -> None:
        """Note the node's clock, as an answer to a heartbeat has brought it."""
        self.clock = max(self.clock, clock)

    def close(self) -> None:
        """Give the connection up; a pending ``ask`` raises ControlPlaneError.

        Not a cancellation: that would end a caller that asks several nodes, in silence.
        """
        self._reader.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ControlPlaneError(self._given_up()))
        self._socket.close()

    def receive(self, message: m.NodeEvent) -> None:
        """Hand on the new events of one message."""
        for event in self.subscription.take(message):
            self._on_event(event)

    def _given_up(self) -> str:
        return f"the connection to node {self.node} was given up"

    async def _read(self) -> None:
        while True:
            number, frame = await self._socket.recv_multipart()
            self.last_heard, self.missed = time.monotonic(), 0
            try:
                message = m.decode(frame)
            except ControlPlaneError as error:
                log.error("node %s: %s", self.node, error)
                continue
            if isinstance(message, m.NodeEvent):
                self.receive(message)
            elif number in self._pending and not self._pending[number].done():
                self._pending[number].set_result(message)
