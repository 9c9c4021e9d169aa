"""What stands for an agent where it was started: on its node, or at the end of a remote shell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from megatron_ft.launchers.agents.meeting import AgentOrders

COMMAND = (sys.executable, "-m", "megatron_ft.launchers.agents")


class Front:
    """One agent, for as long as this object or its process is there."""

    def __init__(self, orders: AgentOrders, through: Sequence[str] = ()) -> None:
        """Start it, through the words of a remote shell and a host where it is not here.

        OSError when there is no such program.
        """
        self.node = orders.node
        self._process = subprocess.Popen(
            [*through, *COMMAND], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        # One that has ended already is told by its status.
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(orders) + b"\n")
            self._process.stdin.flush()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, that of the agent, once it has ended; None if it has not in time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def leave(self) -> None:
        """The agent's input ends, and so does the agent."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
