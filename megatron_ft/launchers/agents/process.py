"""Handle of a process that an agent watches; see ProcessHandle."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from megatron_ft.launchers.agents import messages as m
from megatron_ft.launchers.launcher import UNKNOWN_EXIT


class AgentProcess:
    """``send`` tells the node's agent something; it says whether the agent is there.

    ``begun`` and ``ended`` are set by whoever hears the agent, in any thread.
    """

    def __init__(self, node: str, send: Callable[[str, m.Message], bool]) -> None:
        self.id = uuid.uuid4().hex
        self.begun: Future[m.Running] = Future()
        self.ended: Future[int] = Future()
        self._node, self._send = node, send

    @property
    def pid(self) -> int:
        """Process number on its node."""
        return self.begun.result(0).pid

    @property
    def node(self) -> str:
        """The node that it runs on."""
        return self._node

    @property
    def start_time(self) -> int:
        """Kernel clock ticks of its node."""
        return self.begun.result(0).start_time

    async def wait(self) -> int:
        """Its exit status; UNKNOWN_EXIT if its agent was lost, and then it may still run."""
        # Who gives up waiting does so for himself alone.
        return await asyncio.shield(asyncio.wrap_future(self.ended))

    def kill(self) -> None:
        """SIGKILL by the agent; where there is none it is given up."""
        if self.alive() and not self._send(self._node, m.Kill(self.id)):
            self.end(UNKNOWN_EXIT)

    def alive(self) -> bool:
        """Whether it runs as far as is known here."""
        return not self.ended.done()

    def end(self, status: int) -> None:
        """It has ended; what is said later does not count."""
        with suppress(InvalidStateError):
            self.ended.set_result(status)
