"""The place where a job runs: starts processes and MPI worlds on its nodes.

A launcher for another kind of cluster subclasses Launcher and says which nodes there are, which
are left, and how a process and the daemons of MPI are started on one.  The supervisor knows this
module alone.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ConfigError, ControlPlaneError
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.mpirun import MpiLauncher, find_mpi
from megatron_ft.launchers.process import (
    UNKNOWN_EXIT,
    NodeUnreachable,
    Placement,
    ProcessGoneError,
    ProcessHandle,
)
from megatron_ft.launchers.world import Spread, WorldProcess, probe_world

__all__ = [
    "UNKNOWN_EXIT",
    "Launcher",
    "NodeUnreachable",
    "Placement",
    "ProcessGoneError",
    "ProcessHandle",
    "ReturningHosts",
]


class Launcher(ABC):
    """Starts processes on the nodes of one job.

    Every process gets a session of its own, so it survives the supervisor, even when
    the supervisor is ended with SIGKILL: a later supervisor takes it over with
    ``attach``.  When a node is lost, all its processes are gone and so is its node
    folder; handles of its processes end, and whatever is asked of the node raises
    NodeUnreachable until it returns.

    ``root`` is the folder of all jobs' arenas, at the same path on every node.
    """

    world_kind: type[WorldProcess] = WorldProcess
    knows_losses = False
    """True if ``reachable`` reports each loss at once, so that a silent node still runs."""

    def __init__(self, job: str, root: Path, mpi: MpiLauncher | None = None) -> None:
        """``mpi`` is what starts worlds, found when first needed if None."""
        self.job, self.root, self._mpi = job, root, mpi

    @abstractmethod
    def nodes(self) -> list[str]:
        """All nodes of the job, lost ones included, always in the same order."""

    @abstractmethod
    def reachable(self, node: str) -> bool:
        """False if the node is known to be lost; True promises nothing."""

    @abstractmethod
    def address(self, node: str) -> str:
        """The address at which processes of other nodes, and the supervisor, reach this one.

        A numeric address; its SMP listens there, and the trainers' rendezvous is the
        first node's.
        """

    @abstractmethod
    def ready_file(self, node: str) -> Path:
        """A file that supervisor and node see: processes of the node say where they serve in
        files of their own next to it.
        """

    @abstractmethod
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

    @abstractmethod
    def attach(self, node: str, pid: int, start_time: int | None = None) -> ProcessHandle:
        """Take over a process that an earlier supervisor started on ``node``.

        Raises ProcessGoneError when it has ended, is not a process of this job and node, or
        did not start at ``start_time``; NodeUnreachable as ``start`` does.
        """

    @abstractmethod
    def _spread(self, nodes: Sequence[str], scratch: Path) -> Spread | None:
        """The way of a world to these nodes, which are there; ``scratch`` is its folder."""

    def gone(self, node: str) -> bool:
        """True if no process of the node can run any more; False when in doubt.

        A lost node that was only cut off may train until its lease has run out, which
        the supervisor waits for.
        """
        return False

    def leaving(self) -> dict[str, str] | None:
        """The nodes that the place is about to take away, and why; None if it does not answer."""
        return {}

    def drain_command(self, node: str, reason: str) -> str:
        """The command with which an administrator takes the node out of service; "" if unknown."""
        return ""

    @property
    def job_dir(self) -> Path:
        return self.root / self.job

    def node_dir(self, node: str) -> Path:
        """The job's folder in that node's memory, for its socket and arenas: <root>/<job>/<node>.

        A path on that node, which the supervisor may not be able to open.
        """
        if node not in self.nodes():
            raise ConfigError(f"no node {node!r} in job {self.job}; there are {self.nodes()}")
        return self.job_dir / node

    def check_world(self, ranks: int) -> None:
        """Prove that an MPI world of ``ranks`` processes can be started; takes a second or two.

        Raises MpiError, which says what is missing; NoMpiError where there is no MPI at all.
        """
        nodes = [node for node in self.nodes() if self.reachable(node)][:ranks]
        spread = self._spread(nodes, self.job_dir / ".worlds")
        probe_world(self.mpi(), ranks, base_environment(), nodes=nodes, spread=spread)

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        """Start one MPI world: rank i of it is ``placements[i]``.

        The handle is of the MPI launcher.  When a rank dies, or its node, MPI ends the
        others and ``wait`` returns a status other than 0 (of a node's loss Open MPI may say
        0 inside Slurm); when ``wait`` has returned, no rank is left.  Variables that differ
        between placements can be read by other users of the machine.  Raises NodeUnreachable,
        or NoMpiError.
        """
        placed = [Placement(*placement) for placement in placements]
        if not placed:
            raise ValueError("a world needs at least one placement")
        nodes = [placement.node for placement in placed]
        self._require(nodes)
        marked = [p._replace(env=self._marked(p.node, p.env)) for p in placed]
        scratch = self.job_dir / ".worlds" / uuid.uuid4().hex[:12]
        spread, log = self._spread(nodes, scratch), log_path.absolute()
        return self.world_kind.start(self.mpi(), self.job, marked, log, scratch, spread)

    def mpi(self) -> MpiLauncher:
        """The MPI launcher in use; the first call may start short processes to find it."""
        self._mpi = self._mpi or find_mpi()
        return self._mpi

    def devices(self, index: int, ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that show the ``ranks`` of the node with this index their devices.

        {}: they see all devices of their machine.
        """
        return {}

    def is_away(self, text: str) -> bool:
        """True if a failure with this text is the scheduler's, which starts what it can later."""
        return False

    def is_over(self, text: str) -> bool:
        """True if a failure with this text says that the job's nodes are its own no more."""
        return False

    def _marked(self, node: str, env: Mapping[str, str]) -> dict[str, str]:
        marks = {JOB: self.job, NODE: node, NODE_DIR: str(self.node_dir(node))}
        return {INCARNATION: "0", **env, **marks}

    def _require(self, nodes: Sequence[str]) -> None:
        """NodeUnreachable if one of them is lost."""
        if lost := sorted({node for node in nodes if not self.reachable(node)}):
            raise NodeUnreachable(
                f"node {', '.join(lost)} of job {self.job} is lost; continue without it or put a "
                "spare in its place"
            )


class ReturningHosts:
    """Lost nodes of ``launcher`` that come back by themselves; ``seconds`` is the longest wait."""

    def __init__(self, launcher: Launcher, seconds: float) -> None:
        self.seconds = seconds
        self._launcher, self._away = launcher, list[str]()

    def request(self, count: int) -> str:
        """Name the nodes that are waited for; ControlPlaneError if too few are known to be away."""
        self._away = [n for n in self._launcher.nodes() if not self._launcher.reachable(n)]
        if len(self._away) < count:
            raise ControlPlaneError(f"{len(self._away)} nodes are known to be away, not {count}")
        return f"{' or '.join(self._away)} again"

    def arrived(self) -> list[str]:
        """Nodes that came back since this was asked before."""
        back = [node for node in self._away if self._launcher.reachable(node)]
        self._away = [node for node in self._away if node not in back]
        return back

    def withdraw(self) -> None: ...
