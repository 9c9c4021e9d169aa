"""The coordinator's connection to one SMP: requests with answers, and the node's events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.core.errors import ArenaMemoryError, ControlPlaneError, NoRoomError, error_class
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys

log = logging.getLogger(__name__)

EventCallback = Callable[[m.Event], None]

ARENA_TIMEOUT_SECONDS = 600.0
"""For making an arena, whose pages are all touched."""


class Inbox:
    """Events of one node in their order, each once.  Pure.

    ``number`` is the last event of ``stream`` that has arrived with all before it.  An SMP that
    was replaced, or admitted anew, begins another stream.
    """

    def __init__(self) -> None:
        self.stream = self.number = 0

    def take(self, event: m.Event) -> list[m.Event]:
        """The new events of a message; nothing if one before them was lost: it comes again."""
        if event.stream != self.stream:
            self.stream, self.number = event.stream, 0
        if event.first > self.number + 1:
            return []
        new = [one for one in reported(event) if one.first > self.number]
        if new:
            self.number = new[-1].first
        return new


def reported(event: m.Event) -> list[m.Event]:
    """The events that one message has brought, in the order in which they were told."""
    body = event.body
    bodies = body.bodies if isinstance(body, m.NodeReport) else (body,)
    numbers = range(event.first, event.first + len(bodies))
    told = zip(bodies, numbers, strict=True)
    return [m.Event(event.node, event.incarnation, b, event.stream, n) for b, n in told]


class SmpLink:
    """An authenticated connection to the SMP of ``node``, which also brings what it tells unasked.

    Answers may come in any order, so heartbeats pass a request that takes long.
    ``last_heard`` is the monotonic time of the last frame from there, ``clock`` the newest time
    of the node's own clock that a heartbeat has brought, 0 before the first, ``summary`` the
    digests of the parts of the job's summary that the node has.  ``inbox`` is that of an earlier
    connection to the node, since its SMP may be the same.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        node: str,
        endpoint: str,
        keys: JobKeys,
        on_event: EventCallback,
        inbox: Inbox | None = None,
    ) -> None:
        self.node, self.endpoint = node, endpoint
        self.last_heard = time.monotonic()
        self.clock = 0.0
        self.summary: dict[str, bytes] = {}
        self.inbox = inbox or Inbox()
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
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
        """Like ``ask``, but a Refused is raised as the error that it names."""
        answer = await self.ask(request, timeout)
        if isinstance(answer, m.Refused):
            raise error_class(answer.error)(answer.reason)
        return answer

    async def make_arena(self, request: m.CreateArena) -> None:
        """Have the node make an arena or check the one it has; NoRoomError if it has no room."""
        try:
            await self.demand(request, ARENA_TIMEOUT_SECONDS)
        except ArenaMemoryError as error:
            raise NoRoomError(f"{self.node}: {error}", self.node) from error

    def close(self) -> None:
        """Give the connection up; who waits for an answer gets a ControlPlaneError.

        Not a cancellation: that would end whoever asks this node among others, in silence.
        """
        self._reader.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ControlPlaneError(self._given_up()))
        self._socket.close()

    def _given_up(self) -> str:
        return f"the connection to node {self.node} was given up"

    async def _read(self) -> None:
        while True:
            number, frame = await self._socket.recv_multipart()
            self.last_heard = time.monotonic()
            try:
                message = m.decode(frame)
            except ControlPlaneError as error:
                log.error("node %s: %s", self.node, error)
                continue
            if isinstance(message, m.Event):
                self._hear(message)
            elif number in self._pending and not self._pending[number].done():
                self._pending[number].set_result(message)

    def _hear(self, message: m.Event) -> None:
        for event in self.inbox.take(message):
            self._on_event(event)
