"""Places where a launcher starts processes, one of each kind, for the contract of launchers."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.launchers.agents.agent import AgentFront
from megatron_ft.launchers.agents.hub import AgentHub
from megatron_ft.launchers.agents.launcher import AgentLauncher
from megatron_ft.launchers.agents.rendezvous import FILE_NAME, AgentOrders
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.launchers.slurm.allocation import Allocation
from megatron_ft.launchers.slurm.launcher import SlurmLauncher
from megatron_ft.launchers.virtual import VirtualCluster
from tests.support.slurm_cluster import SlurmCluster

NODES = ["n0", "n1", "n2", "n3"]
WAIT_SECONDS = 30.0
KEPT = ("PATH", "HOME", "SLURM_CONF")


class Site(ABC):
    """Four nodes and the launcher of one job on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        self.job = f"site-{uuid.uuid4().hex[:8]}"
        self.environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        self.launcher = self.make()

    @abstractmethod
    def make(self) -> Launcher:
        """A launcher as the next supervisor of the job makes it, after which the last is idle."""

    @abstractmethod
    def clean(self) -> None:
        """Have the launcher remove the folders of a job that is over."""

    def lose(self, node: str) -> None:
        """Kill everything on a node, and return when the launcher knows it."""
        procfs.kill_matching(lambda pid: self.is_of(pid, node), node)

    def is_of(self, pid: int, node: str) -> bool:
        env = procfs.read_environment(pid)
        return env.get(JOB) == self.job and node in ("", env.get(NODE))

    def close(self) -> None:
        procfs.kill_matching(lambda pid: self.is_of(pid, ""), self.job)


class VirtualSite(Site):
    def make(self) -> VirtualCluster:
        return VirtualCluster(self.job, NODES, self.root)

    def clean(self) -> None:
        self.make().clean()

    def lose(self, node: str) -> None:
        self.make().kill_node(node)


class AgentSite(Site):
    """Agents that find each hub by its file, as with ``--launcher nodes``."""

    def __init__(self, folder: Path, names: Sequence[str] = NODES) -> None:
        self.file, self.hubs = folder / FILE_NAME, list[AgentHub]()
        self.fronts: dict[tuple[str, int], AgentFront] = {}
        folder.chmod(0o700)
        for rank, name in enumerate(names):
            self.agent(name, rank)
        super().__init__(folder)

    def agent(self, name: str, rank: int = 0, *through: str, **orders: Any) -> AgentFront:
        """Start the agent of a node, through the words of a remote shell."""
        orders = {"file": str(self.file), **orders}
        self.fronts[name, rank] = AgentFront(AgentOrders(name, rank, **orders), through)
        return self.fronts[name, rank]

    def make(self) -> AgentLauncher:
        self.hubs.append(AgentHub("127.0.0.1"))
        self.hubs[-1].meeting.write(self.file)
        self.until(lambda: len(self.hubs[-1].seats) == len(self.fronts))
        return AgentLauncher(self.job, self.hubs[-1], self.root, self.file)

    def until(self, there: Callable[[], bool]) -> None:
        assert self.hubs[-1].await_agents(there, WAIT_SECONDS)

    def clean(self) -> None:
        assert isinstance(self.launcher, AgentLauncher)
        self.launcher.clean()

    def lose(self, node: str) -> None:
        front = self.fronts.pop((node, NODES.index(node)))
        front.leave()
        assert front.wait(WAIT_SECONDS) is not None
        super().lose(node)

    def close(self) -> None:
        for hub in self.hubs:
            hub.close(0)
        for front in self.fronts.values():
            front.leave()
        super().close()


class SlurmSite(Site):
    """An allocation of a Slurm that is there; its variables must be in this environment."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        name = f"--job-name={folder.name}"
        cluster.run("salloc", "--no-shell", "--no-kill", f"--nodes={len(NODES)}", name)
        self._number = cluster.run("squeue", "--noheader", name.replace("job-", ""), "--format=%i")
        self._number = self._number.strip()
        variables = {"SLURM_JOB_ID": self._number, "SLURM_JOB_NODELIST": ",".join(NODES)}
        os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
        self._allocation = Allocation.from_environment(variables)
        super().__init__(folder)

    def make(self) -> SlurmLauncher:
        return SlurmLauncher(self.job, self._allocation, self.root, self.folder / "shared")

    def clean(self) -> None:
        self.make().clean()

    def lose(self, node: str) -> None:
        self.cluster.kill_node(node)
        self.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def close(self) -> None:
        self.cluster.run("scancel", self._number, check=False)
        super().close()
        os.environ.pop("SLURM_CONF")
