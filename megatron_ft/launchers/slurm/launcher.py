"""The Launcher for nodes of a Slurm allocation; the supervisor runs in its batch script."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.launcher import NodeUnreachable, Placement
from megatron_ft.launchers.mpirun import MpiLauncher, find_mpi
from megatron_ft.launchers.slurm.allocation import Allocation
from megatron_ft.launchers.slurm.step import StepProcess, step_prefix
from megatron_ft.launchers.slurm.world import StepWorld, reach_by_steps
from megatron_ft.launchers.spread import Spread
from megatron_ft.launchers.world import probe_world

CLEAN_SECONDS = 30.0


class SlurmLauncher:
    """Starts every process as a job step of its own; see Launcher.

    ``root`` is the folder of all jobs' arenas, at the same path on every node.
    ``shared_dir`` is a folder that all nodes see.  ``flags`` are given to each srun.
    """

    def __init__(
        self,
        job: str,
        allocation: Allocation,
        root: Path,
        shared_dir: Path,
        flags: Sequence[str] = (),
    ) -> None:
        self.job, self.allocation, self.root = job, allocation, root
        self._shared, self._flags = shared_dir.absolute(), tuple(flags)
        self._mpi: MpiLauncher | None = None

    def nodes(self) -> list[str]:
        """All nodes that the allocation began with, in Slurm's order; then hosts that came."""
        return list(self.allocation.names)

    def reachable(self, node: str) -> bool:
        """Whether Slurm still counts the node to the job."""
        return node in self.allocation.left()

    def gone(self, node: str) -> bool:
        """Never known: Slurm counts a node that it cannot hear as failed."""
        return False

    def interface(self, node: str) -> str:
        """Left to gloo, or to GLOO_SOCKET_IFNAME in the site's environment."""
        return ""

    def node_dir(self, node: str) -> Path:
        """The node's memory, on that node: <root>/<job>/<node>."""
        if node not in self.allocation.names:
            raise ConfigError(f"no node {node!r} in this allocation; there are {self.nodes()}")
        return self.root / self.job / node

    def ready_file(self, node: str) -> Path:
        """Where the SMP of a node says that it serves: <shared folder>/<node>.json."""
        return self._shared / f"smp-{node}.json"

    def address(self, node: str) -> str:
        """Slurm's NodeAddr as a number."""
        return self.allocation.address(node)

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> StepProcess:
        """Start a step on a node; see Launcher.

        That its program cannot be started is its exit status, with the reason in its log.
        """
        self._require([node])
        given, log = self._marked(node, env), log_path.absolute()
        return StepProcess.begin(self.allocation, node, argv, given, log, self._flags, stdin)

    def attach(self, node: str, pid: int, start_time: int | None = None) -> StepProcess:
        """Take over the step whose srun has this number; see Launcher."""
        self._require([node])
        return StepProcess.of_earlier(self.allocation, node, pid, start_time)

    def check_world(self, ranks: int) -> None:
        """Start a world over the first nodes that counts itself; see Launcher."""
        nodes = [n for n in self.nodes() if self.reachable(n)][:ranks]
        probe_world(self._found_mpi(), ranks, os.environ, nodes=nodes, spread=self._spread(nodes))

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> StepWorld:
        """Start an MPI world over the nodes of ``placements``; see Launcher."""
        placed = [Placement(*p) for p in placements]
        self._require([p.node for p in placed])
        marked = [p._replace(env=self._marked(p.node, p.env)) for p in placed]
        scratch = self.root / self.job / ".worlds" / uuid.uuid4().hex[:12]
        spread = self._spread([p.node for p in placed])
        world = StepWorld.start(
            self._found_mpi(), self.job, marked, log_path.absolute(), scratch, spread
        )
        assert isinstance(world, StepWorld)
        return world

    def clean(self) -> None:
        """Remove the job's folder on all nodes that are left; the job is over.

        Replacement hosts do so themselves when their jobs end.
        """
        left = sorted(n for n in self.allocation.left() if self._is_own(n))
        command = [*step_prefix(self._flags), f"--jobid={self.allocation.job_id}"]
        command += [f"--nodelist={','.join(left)}"]
        command += [f"--nodes={len(left)}", f"--ntasks={len(left)}", "--output=none"]
        command += ["rm", "-rf", str(self.root / self.job)]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=CLEAN_SECONDS, check=False)
        shutil.rmtree(self._shared, ignore_errors=True)

    def _is_own(self, node: str) -> bool:
        return self.allocation.job_of(node) == self.allocation.job_id

    def _found_mpi(self) -> MpiLauncher:
        self._mpi = self._mpi or find_mpi()
        return self._mpi

    def _spread(self, nodes: Sequence[str]) -> Spread:
        job_dir = self.root / self.job
        jobs = {node: self.allocation.job_of(node) for node in nodes}
        settings = reach_by_steps(self._found_mpi(), jobs, job_dir, self._flags, self._shared)
        # MPICH's proxies call mpirun, which is where the batch script is.
        here = os.environ.get("SLURMD_NODENAME", "")
        address = self.allocation.address(here) if here in self.allocation.names else ""
        return Spread(nodes, address, settings)

    def _marked(self, node: str, env: Mapping[str, str]) -> dict[str, str]:
        marks = {JOB: self.job, NODE: node, NODE_DIR: str(self.node_dir(node))}
        return {INCARNATION: "0", **env, **marks}

    def _require(self, nodes: Sequence[str]) -> None:
        lost = sorted({n for n in nodes if not self.reachable(n)})
        if lost:
            raise NodeUnreachable(
                f"node {', '.join(lost)} has failed and Slurm has taken it out of job "
                f"{self.allocation.job_id}; go on without it or put a spare in its place"
            )
