"""An MPI world whose daemons are started by agents; mpirun runs beside the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.launchers.agents import remote_shell
from megatron_ft.launchers.agents.hub import AgentHub
from megatron_ft.launchers.mpirun import MpiKind, MpiLauncher, mpich_by, open_mpi_by
from megatron_ft.launchers.world import Spread, WorldProcess

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
