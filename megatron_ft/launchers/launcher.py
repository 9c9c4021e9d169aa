"""Protocols between the supervisor and the place where a job runs.

One implementation per kind of cluster; the supervisor knows only this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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


class HostSource(Protocol):
    """A source of more nodes for a job."""

    seconds: float
    """Longest to wait for them."""

    def request(self, count: int) -> str:
        """Ask for so many; what was asked for, in words.  MegatronFTError if that is refused."""

    def arrived(self) -> list[str]:
        """Nodes that came since this was asked before; the launcher has them from now on."""

    def withdraw(self) -> None:
        """Give back what was asked for and has not come."""


class Launcher(Protocol):
    """Starts processes on the nodes of one job.

    Every process gets a session of its own, so it survives the supervisor, even when
    the supervisor is ended with SIGKILL: a later supervisor takes it over with
    ``attach``.  When a node is lost, all its processes are gone and so is its node
    folder; handles of its processes end, and whatever is asked of the node raises
    NodeUnreachable until it returns.
    """

    def nodes(self) -> list[str]:
        """All nodes of the job, lost ones included, always in the same order."""

    def reachable(self, node: str) -> bool:
        """False if the node is known to be lost; True promises nothing."""

    def gone(self, node: str) -> bool:
        """True if no process of the node can run any more; False when in doubt.

        A lost node that was only cut off may train until its lease has run out, which
        the supervisor waits for.
        """

    def address(self, node: str) -> str:
        """The address at which processes of other nodes, and the supervisor, reach this one.

        A numeric address; its SMP listens there, and the trainers' rendezvous is the
        first node's.
        """

    def interface(self, node: str) -> str:
        """The network device of that address, for gloo; empty if gloo is to choose."""

    def node_dir(self, node: str) -> Path:
        """The job's folder in that node's memory, for its socket and its arenas.

        A path on that node, which the supervisor may not be able to open.
        """

    def ready_file(self, node: str) -> Path:
        """A file that supervisor and node see: processes of the node say where they serve in
        files of their own beside it.
        """

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> ProcessHandle:
        """Start one process on ``node``.

        ``env`` is its complete environment, to which the launcher adds the job, the node
        and the node's folder.  Both output streams are appended to ``log_path``.  It
        reads ``stdin`` (at most 4096 bytes) from a pipe and then end of file; this is how
        a secret travels, because argv and environment of a process can be read by
        others.  Raises NodeUnreachable, MissingEnvironmentError when the program cannot be
        run, or ControlPlaneError when nothing can be started there just now.
        """

    def attach(self, node: str, pid: int, start_time: int | None = None) -> ProcessHandle:
        """Take over a process that an earlier supervisor started on ``node``.

        Raises ProcessGoneError when it has ended, is not a process of this job and node, or
        did not start at ``start_time``; NodeUnreachable as ``start`` does.
        """

    def check_world(self, ranks: int) -> None:
        """Prove that an MPI world of ``ranks`` processes can be started; takes a second or two.

        Raises MpiError, which says what is missing; NoMpiError where there is no MPI at all.
        """

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> ProcessHandle:
        """Start one MPI world: rank i of it is ``placements[i]``.

        The handle is of the MPI launcher.  When a rank dies, or its node, MPI ends the
        others and ``wait`` returns a status other than 0; when ``wait`` has returned, no
        rank is left.  Variables that differ between placements can be read by other users
        of the machine.  Raises NodeUnreachable, or NoMpiError.
        """
