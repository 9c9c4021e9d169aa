"""A connection to one SMP: requests with answers, in any order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.errors import ControlPlaneError, error_class
from megatron_ft.smp import messages as m
from megatron_ft.smp.security import JobKeys

log = logging.getLogger(__name__)


class RequestLink:
    """An authenticated connection to the SMP of ``node``.

    Answers may come in any order, so heartbeats pass a request that takes long.
    ``last_heard`` is the monotonic time of the last frame from there.
    """

    def __init__(
        self, context: zmq.asyncio.Context, node: str, endpoint: str, keys: JobKeys
    ) -> None:
        self.node, self.endpoint = node, endpoint
        self.last_heard = time.monotonic()
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        keys.protect_client(self._socket)
        self._socket.connect(endpoint)
        self._reader = asyncio.create_task(self._read())

    async def ask(self, request: m.Message, timeout: float) -> Any:
        """The answer to a request, Refused included.  ControlPlaneError after ``timeout`` s."""
        return await self.ask_frame(m.encode(request), type(request).__name__, timeout)

    async def ask_frame(self, frame: bytes, what: str, timeout: float) -> Any:
        """``ask`` with a request that is encoded already; ``what`` is its name for people."""
        if self._socket.closed:
            raise ControlPlaneError(self._given_up())
        number = str(next(self._numbers)).encode()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self._socket.send_multipart([number, frame])
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError as error:
            raise ControlPlaneError(
                f"the SMP of node {self.node} ({self.endpoint}) did not answer "
                f"{what} in {timeout:.1f} s"
            ) from error
        finally:
            self._pending.pop(number, None)

    async def demand(self, request: m.Message, timeout: float) -> Any:
        """Like ``ask``, but a Refused is raised as the error that it names."""
        answer = await self.ask(request, timeout)
        if isinstance(answer, m.Refused):
            raise error_class(answer.error)(answer.reason)
        return answer

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

    def _hear(self, report: m.Event | m.Gathered) -> None:
        """What was not asked for; only a coordinator is told events."""

    async def _read(self) -> None:
        while True:
            number, frame = await self._socket.recv_multipart()
            self.last_heard = time.monotonic()
            try:
                message = m.decode(frame)
            except ControlPlaneError as error:
                log.error("node %s: %s", self.node, error)
                continue
            if isinstance(message, m.Event | m.Gathered):
                self._hear(message)
            elif number in self._pending and not self._pending[number].done():
                self._pending[number].set_result(message)
