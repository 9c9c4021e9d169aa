"""A process that a launcher started: where it runs, its handle, and what can go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron_ft.core.errors import ControlPlaneError

# Signal numbers end at 64, so no process that was reaped can have this status.
UNKNOWN_EXIT = -128
"""Exit status of a process that somebody else started: only its parent learns the real one."""


class NodeUnreachable(ControlPlaneError):
    """The node is lost, or cannot be reached now; nothing was started there."""


class ProcessGoneError(ControlPlaneError):
    """The process to attach to has ended, or its number belongs to another process by now."""


class Placement(NamedTuple):
    """One process of a world: where it runs, what it runs, and its complete environment."""

    node: str
    argv: Sequence[str]
    env: Mapping[str, str]


class ProcessHandle(Protocol):
    """One process, or one MPI world, that a launcher started or attached to."""

    @property
    def pid(self) -> int:
        """Process number on its node; for a world, that of its MPI launcher.

        Where a launcher starts it by a command that runs as long as it does, of that command.
        """

    @property
    def node(self) -> str:
        """The node it runs on; empty for a world, which belongs to no node."""

    @property
    def start_time(self) -> int:
        """Kernel clock ticks from boot to its start: with the pid it names a process for good."""

    async def wait(self) -> int:
        """Its exit status once it has ended; any number of tasks may wait.

        A status below zero is the number of the signal that killed it, as in
        ``subprocess``.  Of a process that was attached to it is UNKNOWN_EXIT.
        """

    def kill(self) -> None:
        """SIGKILL to it and to all it started; returns at once, harmless when it has ended."""

    def alive(self) -> bool:
        """True if it still runs; a zombie does not."""
