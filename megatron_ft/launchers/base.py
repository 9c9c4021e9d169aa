"""Shared base of launchers: marks of processes, folders of nodes, MPI worlds.

A launcher for another kind of cluster subclasses BaseLauncher and says which nodes there are, which
are left, and how a process and the daemons of MPI are started on one.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.launcher import NodeUnreachable, Placement
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.mpirun import MpiLauncher, find_mpi
from megatron_ft.launchers.world import Spread, WorldProcess, probe_world


class BaseLauncher(ABC):
    """Implements the parts of Launcher that do not depend on the cluster.

    ``root`` is the folder of all jobs' arenas, at the same path on every node.
    """

    world_kind: type[WorldProcess] = WorldProcess

    def __init__(self, job: str, root: Path, mpi: MpiLauncher | None = None) -> None:
        """``mpi`` is what starts worlds, found when first needed if None."""
        self.job, self.root, self._mpi = job, root, mpi

    @abstractmethod
    def nodes(self) -> list[str]:
        """See Launcher."""

    @abstractmethod
    def reachable(self, node: str) -> bool:
        """See Launcher."""

    @abstractmethod
    def _spread(self, nodes: Sequence[str], scratch: Path) -> Spread | None:
        """The way of a world to these nodes, which are there; ``scratch`` is its folder."""

    def gone(self, node: str) -> bool:
        """False: a node that cannot be heard may continue running."""
        return False

    @property
    def job_dir(self) -> Path:
        """The job's folder on each node."""
        return self.root / self.job

    def node_dir(self, node: str) -> Path:
        """The node's memory, on that node: <root>/<job>/<node>."""
        if node not in self.nodes():
            raise ConfigError(f"no node {node!r} in job {self.job}; there are {self.nodes()}")
        return self.job_dir / node

    def check_world(self, ranks: int) -> None:
        """Start a world over the first nodes that counts itself; see Launcher."""
        nodes = [node for node in self.nodes() if self.reachable(node)][:ranks]
        spread = self._spread(nodes, self.job_dir / ".worlds")
        probe_world(self.mpi(), ranks, base_environment(), nodes=nodes, spread=spread)

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        """Start an MPI world over the nodes of ``placements``; see Launcher."""
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
