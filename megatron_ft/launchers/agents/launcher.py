"""The Launcher for nodes with agents; the supervisor runs on any machine that they reach."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ConfigError, ControlPlaneError
from megatron_ft.launchers.agents import remote_shell
from megatron_ft.launchers.agents.hub import AgentHub, AgentProcess
from megatron_ft.launchers.launcher import NodeUnreachable, Placement
from megatron_ft.launchers.mpirun import MpiKind, MpiLauncher, find_mpi, mpich_by, open_mpi_by
from megatron_ft.launchers.outer_launcher import base_environment
from megatron_ft.launchers.world import Spread, WorldProcess, probe_world
from megatron_ft.rpc import messages as m

CLEAN_SECONDS = 30.0
END_SECONDS = 10.0


def spread_by_agents(
    mpi: MpiLauncher,
    addresses: Mapping[str, str],
    ranks: Sequence[str],
    here: str,
    file: Path,
    job_dir: Path,
) -> Spread:
    """A world with a rank on each node of ``ranks``; ``addresses`` are those of all nodes,
    ``here`` is the supervisor's.

    ``file`` is the supervisor's, with room beside it for one of ours.
    """
    hosts = [addresses[node] for node in ranks]
    command = [sys.executable, "-m", remote_shell.__name__]
    settings = {
        remote_shell.MEETING: str(file),
        remote_shell.NODES: " ".join(f"{a}={node}" for node, a in addresses.items()),
        remote_shell.FOLDER: str(job_dir),
    }
    if mpi.kind is MpiKind.OPEN_MPI:
        return Spread(hosts, here, settings | open_mpi_by(command))
    program = file.with_name("remote-shell")
    return Spread(hosts, here, settings | mpich_by(command, program))


class AgentWorld(WorldProcess):
    """Handle of such a world: ranks on other nodes are ended by their agents."""

    hub: AgentHub | None = None
    nodes: tuple[str, ...] = ()

    def _clear(self) -> None:
        if self.hub is not None:
            self.hub.end_world(self.job, self.world, self.nodes, END_SECONDS)
        super()._clear()


class AgentLauncher:
    """Has agents start all processes; see Launcher.

    ``root`` is the folder of all jobs' arenas, at the same path on every node.  ``meeting`` is
    the supervisor's file in a folder that all nodes see.  ``names`` are nodes that belong to the
    job although nothing was heard of them yet.
    """

    def __init__(
        self, job: str, hub: AgentHub, root: Path, meeting: Path, names: Sequence[str] = ()
    ) -> None:
        self.job, self.hub, self.root = job, hub, root
        self._meeting = meeting.absolute()
        seats = sorted(hub.seats, key=lambda node: hub.seats[node].rank)
        self._names = list(dict.fromkeys([*names, *seats]))
        self._mpi: MpiLauncher | None = None

    def nodes(self) -> list[str]:
        """Nodes in the order of their ranks; those that came later, as replacements, are last."""
        self._names += [node for node in self.hub.seats if node not in self._names]
        return list(self._names)

    def reachable(self, node: str) -> bool:
        """Whether the node's agent was heard of lately."""
        return self.hub.there(node)

    def gone(self, node: str) -> bool:
        """Never known: an agent may be lost and its node not."""
        return False

    def interface(self, node: str) -> str:
        """Left to gloo, or to GLOO_SOCKET_IFNAME in the supervisor's environment."""
        return ""

    def node_dir(self, node: str) -> Path:
        """The node's memory, on that node: <root>/<job>/<node>."""
        if node not in self.nodes():
            raise ConfigError(f"no node {node!r} in this job; there are {self.nodes()}")
        return self.root / self.job / node

    def ready_file(self, node: str) -> Path:
        """Where the SMP of a node says that it serves: <shared folder>/smp-<node>.json."""
        return self._meeting.with_name(f"smp-{node}.json")

    def address(self, node: str) -> str:
        """The address by which the node reaches the supervisor; see Launcher."""
        seat = self.hub.seats.get(node)
        if seat is None:
            raise NodeUnreachable(f"nothing was ever heard of an agent on node {node}")
        return seat.address

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> AgentProcess:
        """Have a node's agent start a process; see Launcher."""
        given, log = self._marked(node, env), str(log_path.absolute())
        words = tuple(map(str, argv))
        return self.hub.begin(node, lambda name: m.StartProcess(name, words, given, log, stdin))

    def attach(self, node: str, pid: int, start_time: int | None = None) -> AgentProcess:
        """Take over a process that an agent of this node started; see Launcher."""
        return self.hub.begin(node, lambda name: m.AttachProcess(name, self.job, pid, start_time))

    def check_world(self, ranks: int) -> None:
        """Start a world over the first nodes that counts itself; see Launcher."""
        nodes = [node for node in self.nodes() if self.reachable(node)][:ranks]
        spread = self._spread(nodes)
        probe_world(self.mpi(), ranks, base_environment(), nodes=nodes, spread=spread)

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> AgentWorld:
        """Start an MPI world over the nodes of ``placements``; see Launcher."""
        placed = [Placement(*p) for p in placements]
        nodes = [p.node for p in placed]
        if lost := [node for node in nodes if not self.reachable(node)]:
            raise NodeUnreachable(f"node {', '.join(lost)} has no agent; go on without it")
        marked = [p._replace(env=self._marked(p.node, p.env)) for p in placed]
        scratch = self.root / self.job / ".worlds" / uuid.uuid4().hex[:12]
        spread, log = self._spread(nodes), log_path.absolute()
        world = AgentWorld.start(self.mpi(), self.job, marked, log, scratch, spread)
        assert isinstance(world, AgentWorld)
        world.hub, world.nodes = self.hub, tuple(nodes) if spread.hosts else ()
        return world

    def mpi(self) -> MpiLauncher:
        """The MPI launcher in use; the first call may start short processes to find it."""
        self._mpi = self._mpi or find_mpi()
        return self._mpi

    def clean(self) -> None:
        """Remove the job's folder on all nodes that are there; the job is over."""
        folder = self.root / self.job
        handles = []
        for node in filter(self.reachable, self.nodes()):
            command = ["rm", "-rf", str(folder)]
            try:
                handles.append(self.start(node, command, base_environment(), Path("/dev/null")))
            except ControlPlaneError:
                continue  # It is lost, and its memory with it.
        for handle in handles:
            handle.ended.result(CLEAN_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)

    def _spread(self, nodes: list[str]) -> Spread:
        addresses = {node: seat.address for node, seat in self.hub.seats.items()}
        if {addresses[node] for node in nodes} == {self.hub.meeting.host}:
            return Spread()  # All on the supervisor's own machine: it needs no network.
        job_dir = self.root / self.job
        here = self.hub.meeting.host
        return spread_by_agents(self.mpi(), addresses, nodes, here, self._meeting, job_dir)

    def _marked(self, node: str, env: Mapping[str, str]) -> dict[str, str]:
        marks = {JOB: self.job, NODE: node, NODE_DIR: str(self.node_dir(node))}
        return {INCARNATION: "0", **env, **marks}
