"""Nodes with agents as the place of a job: ``--launcher nodes`` and ``--launcher hostfile``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.cli.say import say
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.node_names import check_names
from megatron_ft.launchers.agents.front import Front
from megatron_ft.launchers.agents.hostfile import read_hostfile
from megatron_ft.launchers.agents.hub import AgentHub
from megatron_ft.launchers.agents.launcher import AgentLauncher
from megatron_ft.launchers.agents.meeting import FILE_NAME, AgentOrders, address_towards
from megatron_ft.launchers.agents.node_rank import NodeRank, node_rank
from megatron_ft.supervisor.job_state import make_notes_folder, state_folder

NODES, HOSTFILE = "nodes", "hostfile"
GATHER_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_SSH = "ssh -o BatchMode=yes"
# Nothing is there (RFC 5737), but the way to it is the way out of this machine.
_ANYWHERE = "192.0.2.1"
_ONLY = {"hostfile": HOSTFILE, "remote_shell": HOSTFILE, "node_rank": NODES, "node_name": NODES}


@dataclass(frozen=True)
class AgentPlace:
    """A launcher whose agents are there, how many nodes train, and how all is ended."""

    launcher: AgentLauncher
    nodes: int
    leave: Callable[[int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of these two launchers."""
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="lines `name slots=8`, as for mpirun and deepspeed; spares come last",
    )
    parser.add_argument(
        "--remote-shell",
        metavar="COMMAND",
        help=f"how --launcher hostfile reaches a host, whose name follows (default: {_SSH})",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        help="with --launcher nodes: number of this node, where the launcher's variables do not "
        "say it; 0 supervises",
    )
    parser.add_argument(
        "--node-name", help="with --launcher nodes: name of this node (default: its host name)"
    )
    parser.add_argument(
        "--address", help="address of this machine at which the agents of all nodes reach it"
    )


def check(arguments: argparse.Namespace) -> None:
    """ConfigError for flags of another launcher."""
    for name, launcher in _ONLY.items():
        if getattr(arguments, name) is not None and arguments.launcher != launcher:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} needs --launcher {launcher}")
    if arguments.launcher == HOSTFILE and arguments.hostfile is None:
        raise ConfigError("--launcher hostfile needs --hostfile FILE")


def meeting_folder(arguments: argparse.Namespace) -> Path:
    """The folder in which nodes find the supervisor: the same for all who run this command."""
    folder = state_folder(arguments.job, arguments.state_dir)
    return folder.with_name(f"{folder.name}.{arguments.command}.nodes").absolute()


def serve(arguments: argparse.Namespace) -> int | None:
    """Be a node of a job that is supervised elsewhere; None if it is supervised here."""
    check(arguments)
    if arguments.launcher != NODES or _rank(arguments).rank == 0:
        return None
    # The supervisor drains first, and then tells us to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    rank = _rank(arguments).rank
    return _own_agent(arguments, rank, meeting_folder(arguments)).wait()


def gather(arguments: argparse.Namespace, root: Path, folder: Path) -> AgentPlace:
    """Call all nodes of the job together.

    ConfigError if too few come, or two with the same name.
    """
    make_notes_folder(folder, close=False)
    file = folder / FILE_NAME
    hosts = read_hostfile(arguments.hostfile) if arguments.launcher == HOSTFILE else []
    size = len(hosts) or _rank(arguments).size
    nodes = size - arguments.spares if arguments.nodes is None else arguments.nodes
    check_names(root, arguments.job, hosts)
    hub = AgentHub(arguments.address or own_address(os.environ, hosts[0] if hosts else ""))
    hub.meeting.write(file)
    fronts: list[Front] = []

    def leave(code: int) -> None:
        hub.close(code)
        for front in fronts:
            front.leave()
        file.unlink(missing_ok=True)
        if code == 0:
            # Where SMPs served, and logs of MPI's daemons: of no use to anybody now.
            shutil.rmtree(folder, ignore_errors=True)

    try:
        fronts += _over_remote_shells(arguments, hub, hosts) or [_own_agent(arguments, 0, folder)]
        _await_agents(hub, fronts, size)
        _check_seats(hub, hosts, size, nodes + arguments.spares)
        check_names(root, arguments.job, list(hub.seats))
    except BaseException:
        leave(1)
        raise
    return AgentPlace(AgentLauncher(arguments.job, hub, root, file, hosts), nodes, leave)


def own_address(environment: Mapping[str, str], towards: str = "") -> str:
    """The address at which other nodes reach this machine.

    That towards one of them, MASTER_ADDR if it is here, or the one towards the outside.
    """
    master = environment.get("MASTER_ADDR", "")
    for host in (towards, master, _ANYWHERE):
        try:
            address = socket.gethostbyname(host) if host else ""
            if host == master and address:
                with socket.socket() as probe:
                    probe.bind((address, 0))
                return address
            if address:
                return address_towards(address)
        except OSError:
            continue
    return "127.0.0.1"


def _rank(arguments: argparse.Namespace) -> NodeRank:
    wanted = None if arguments.nodes is None else arguments.nodes + arguments.spares
    return node_rank(os.environ, arguments.node_rank, wanted)


def _own_agent(arguments: argparse.Namespace, rank: int, folder: Path) -> Front:
    name = arguments.node_name or socket.gethostname()
    return Front(AgentOrders(name, rank, file=str(folder / FILE_NAME)))


def _over_remote_shells(
    arguments: argparse.Namespace, hub: AgentHub, hosts: list[str]
) -> list[Front]:
    shell = shlex.split(arguments.remote_shell or _SSH)
    try:
        return [
            Front(AgentOrders(host, rank, hub.meeting), [*shell, host])
            for rank, host in enumerate(hosts)
        ]
    except OSError as error:
        raise ConfigError(f"--remote-shell {shell[0]!r}: {error.strerror}") from error


def _await_agents(hub: AgentHub, fronts: list[Front], size: int) -> None:
    """Until all agents are there, or none is to be expected any more."""
    deadline = time.monotonic() + GATHER_SECONDS
    while time.monotonic() < deadline:
        if hub.await_agents(lambda: len(hub.seats) >= size, _LOOK_SECONDS):
            return
        if all(front.node in hub.seats or front.wait(0) is not None for front in fronts):
            if len(fronts) == size:
                return


def _check_seats(hub: AgentHub, hosts: list[str], size: int, wanted: int) -> None:
    ranks = {seat.rank for seat in hub.seats.values()}
    missing = [host for host in hosts if host not in hub.seats]
    missing = missing or [f"rank {rank}" for rank in range(size) if rank not in ranks]
    said = f"nothing is heard of {', '.join(missing)}" if missing else ""
    if len(hub.seats) < wanted:
        raise ConfigError(
            f"{len(hub.seats)} nodes are there and {wanted} are needed"
            f"{'; ' * bool(said)}{said}: does the same command run on each, see the same "
            f"--state-dir, and reach {hub.meeting.host}?"
        )
    if said:
        # The output may be JSON, of the doctor.
        say(f"megatron-ft: {said}; going on without", sys.stderr)
