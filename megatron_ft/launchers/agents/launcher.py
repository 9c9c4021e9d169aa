"""The Launcher for nodes with agents; the supervisor runs on any machine that they reach."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.process_tools import carried
from megatron_ft.launchers.agents import remote_shell
from megatron_ft.launchers.agents.hub import AgentHub, AgentProcess
from megatron_ft.launchers.launcher import Launcher, NodeUnreachable
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.mpirun import daemons_by
from megatron_ft.launchers.world import Spread
from megatron_ft.rpc import messages as m

CLEAN_SECONDS = 30.0
END_SECONDS = 10.0


class AgentLauncher(Launcher):
    """Has agents start all processes; see Launcher.

    ``meeting`` is the supervisor's file in a folder that all nodes see.  ``names`` are nodes that
    belong to the job although their agents have not come yet.
    """

    def __init__(
        self, job: str, hub: AgentHub, root: Path, meeting: Path, names: Sequence[str] = ()
    ) -> None:
        super().__init__(job, root)
        self.hub = hub
        self._meeting = meeting.absolute()
        seats = sorted(hub.seats, key=lambda node: hub.seats[node].rank)
        self._names = list(dict.fromkeys([*names, *seats]))

    def nodes(self) -> list[str]:
        """Nodes in the order of their ranks; those that came later, as replacements, are last."""
        self._names += [node for node in self.hub.seats if node not in self._names]
        return list(self._names)

    def reachable(self, node: str) -> bool:
        return self.hub.there(node)

    def ready_file(self, node: str) -> Path:
        """File in which the SMP of a node announces itself: <shared folder>/smp-<node>.json."""
        return self._meeting.with_name(f"smp-{node}.json")

    def address(self, node: str) -> str:
        seat = self.hub.seats.get(node)
        if seat is None:
            raise NodeUnreachable(f"no agent on node {node} has ever answered")
        return seat.address

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> AgentProcess:
        log = carried(str(log_path.absolute()))
        given = {carried(n): carried(v) for n, v in self._marked(node, env).items()}
        words = tuple(carried(str(word)) for word in argv)
        return self.hub.launch(node, lambda name: m.StartProcess(name, words, given, log, stdin))

    def attach(self, node: str, pid: int, start_time: int | None = None) -> AgentProcess:
        return self.hub.launch(node, lambda name: m.AttachProcess(name, self.job, pid, start_time))

    def clean(self) -> None:
        """Remove the job's folder on all nodes that are there; the job is over."""
        handles = []
        for node in filter(self.reachable, self.nodes()):
            command = ["rm", "-rf", str(self.job_dir)]
            try:
                handles.append(self.start(node, command, base_environment(), Path("/dev/null")))
            except ControlPlaneError:
                continue  # It is lost, and its memory with it.
        for handle in handles:
            handle.ended.result(CLEAN_SECONDS)
        shutil.rmtree(self.job_dir, ignore_errors=True)

    def _spread(self, nodes: Sequence[str], scratch: Path) -> Spread:
        if {self.address(node) for node in nodes} == {self.hub.meeting.host}:
            return Spread()  # a world on the supervisor's own machine needs no network
        addresses = {node: seat.address for node, seat in self.hub.seats.items()}
        settings = {
            remote_shell.MEETING: str(self._meeting),
            remote_shell.NODES: " ".join(f"{a}={node}" for node, a in addresses.items()),
            remote_shell.FOLDER: str(self.job_dir),
        }
        settings |= daemons_by(self.mpi(), remote_shell.__name__, self._meeting.parent)
        return Spread(
            [addresses[node] for node in nodes],
            self.hub.meeting.host,
            settings,
            end=lambda world: self.hub.end_world(self.job, world, nodes, END_SECONDS),
        )
