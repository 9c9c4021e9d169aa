"""The place where ``megatron-ft run`` runs a job, chosen by ``--launcher``.

It is virtual nodes of this machine, a Slurm allocation, or nodes with agents: those on which
this same command was started (``nodes``), or those of a host file (``hostfile``).
"""

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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ft.cli.common import say
from megatron_ft.cli.parser import for_few, seconds
from megatron_ft.core.environment import check_names
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import CHEAPEST, HOLD, STOP
from megatron_ft.launchers.agents.agent import AgentFront
from megatron_ft.launchers.agents.hub import AgentHub
from megatron_ft.launchers.agents.launcher import AgentLauncher
from megatron_ft.launchers.agents.rendezvous import (
    FILE_NAME,
    AgentOrders,
    NodeRank,
    address_towards,
    node_rank,
    read_hostfile,
)
from megatron_ft.launchers.launcher import Launcher, ReturningHosts
from megatron_ft.launchers.slurm.allocation import Allocation, ReplacementHosts
from megatron_ft.launchers.slurm.launcher import SlurmLauncher
from megatron_ft.launchers.virtual import VirtualCluster, default_root
from megatron_ft.supervisor.job_state import make_notes_folder, state_folder

VIRTUAL, SLURM, NODES, HOSTFILE = "virtual", "slurm", "nodes", "hostfile"
VIRTUAL_NODES = 4
HOLD_SECONDS = 600.0
GATHER_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_SSH = "ssh -o BatchMode=yes"
# Nothing is there (RFC 5737), but the way to it is the way out of this machine.
_ANYWHERE = "192.0.2.1"
_ONLY = {
    "hostfile": HOSTFILE, "remote_shell": HOSTFILE, "node_rank": NODES, "node_name": NODES,
    "srun_flags": SLURM, "sbatch_flags": SLURM,
}  # fmt: skip


@dataclass(frozen=True)
class RunPlace:
    """A launcher, how many nodes train, and what only the place knows.

    ``seconds_left`` until it ends the job, 0: never.  ``clean`` removes what a job that is done
    left on its nodes; ``destroy`` also ends its processes.  ``hint`` explains what becomes of
    memory when the job has stopped.  ``hosts`` is where replacements of lost nodes come from.
    ``leave`` takes the exit code to all nodes, at the very end.
    """

    launcher: Launcher
    nodes: int
    seconds_left: float
    clean: Callable[[], None]
    destroy: Callable[[], None]
    hint: str
    hosts: ReplacementHosts | ReturningHosts | None = None
    leave: Callable[[int], None] = lambda code: None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the nodes")
    group.add_argument(
        "--launcher",
        choices=(VIRTUAL, SLURM, NODES, HOSTFILE),
        default=VIRTUAL,
        help="virtual: nodes are groups of processes of this machine; slurm: those of the "
        "allocation that this runs in; nodes: those on which mpirun, torchrun, deepspeed or srun "
        "has started this same command, once on each; hostfile: those in --hostfile (default: "
        "%(default)s; docs/how-to/launchers.md)",
    )
    group.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="lines `name slots=8`, as for mpirun and deepspeed; spares come last",
    )
    group.add_argument(
        "--hold-seconds",
        type=seconds,
        default=HOLD_SECONDS,
        metavar="SECONDS",
        help="longest wait of --on-no-spare hold, then stop, or of auto, then another way "
        "(default: %(default)g)",
    )
    for flag, metavar, text in (
        (
            "--remote-shell",
            "COMMAND",
            f"how --launcher hostfile reaches a host, whose name follows (default: {_SSH})",
        ),
        (
            "--node-name",
            "NAME",
            "with --launcher nodes: name of this node (default: its host name)",
        ),
        ("--address", "ADDRESS", "address of this machine at which agents of all nodes reach it"),
    ):
        group.add_argument(flag, metavar=metavar, help=for_few(parser, text))
    group.add_argument(
        "--node-rank",
        type=int,
        metavar="N",
        help=for_few(
            parser,
            "with --launcher nodes: number of this node, where the launcher's variables do not "
            "say it; 0 supervises",
        ),
    )
    group.add_argument(
        "--srun-flags",
        default="",
        metavar="FLAGS",
        help=for_few(
            parser, "more flags for each srun, as one word: --srun-flags='--container-image=...'"
        ),
    )
    group.add_argument(
        "--sbatch-flags",
        default="",
        metavar="FLAGS",
        help=for_few(
            parser,
            "more flags for the sbatch of a replacement host, as one word: "
            "--sbatch-flags=--gpus-per-node=8",
        ),
    )


def place_of(
    arguments: argparse.Namespace,
    root: Path | None,
    state_folder: Path,
    meeting_folder: Path,
    on_no_spare: str = STOP,
) -> RunPlace:
    """The place that the flags ask for.

    ``root`` is the folder of all jobs' arenas, None: the usual one.
    Agents meet the supervisor in ``meeting_folder``; ``on_no_spare`` is the job's setting.
    ConfigError for flags that do not fit the place.
    """
    root = root or default_root()
    if arguments.launcher == SLURM:
        return _slurm(arguments, root, state_folder, on_no_spare in (HOLD, CHEAPEST))
    if on_no_spare == HOLD:
        raise ConfigError("--on-no-spare hold needs --launcher slurm")
    agents = arguments.launcher in (NODES, HOSTFILE)
    place = _gather(arguments, root, meeting_folder) if agents else _virtual(arguments, root)
    if on_no_spare != CHEAPEST:
        return place
    return replace(place, hosts=ReturningHosts(place.launcher, arguments.hold_seconds))


def virtual_nodes(arguments: argparse.Namespace) -> tuple[int, list[str]]:
    """The number of virtual nodes that train, and the names of all; spares come last."""
    nodes: int = VIRTUAL_NODES if arguments.nodes is None else arguments.nodes
    return nodes, [f"node{i}" for i in range(nodes + arguments.spares)]


def _virtual(arguments: argparse.Namespace, root: Path) -> RunPlace:
    nodes, names = virtual_nodes(arguments)
    cluster = VirtualCluster(arguments.job, names, root)
    hint = (
        "snapshots stay in memory: run the same command again to continue, or free it with "
        f"`megatron-ft clean --job {arguments.job}`"
    )
    return RunPlace(cluster, nodes, 0.0, cluster.clean, cluster.destroy, hint)


def _slurm(arguments: argparse.Namespace, root: Path, state_folder: Path, hold: bool) -> RunPlace:
    allocation = Allocation.from_environment()
    there = len(allocation.names)
    nodes: int = there - arguments.spares if arguments.nodes is None else arguments.nodes
    if nodes < 1 or nodes + arguments.spares > there:
        raise ConfigError(
            f"job {allocation.job_id} has {there} nodes, not enough for {nodes} that train and "
            f"{arguments.spares} spares: give sbatch a larger --nodes"
        )
    flags = shlex.split(arguments.srun_flags)
    notes = state_folder.with_name(f"{state_folder.name}.nodes")
    check_names(root, arguments.job, allocation.names)
    make_notes_folder(notes)
    launcher = SlurmLauncher(arguments.job, allocation, root, notes, flags)
    hint = "snapshots stay in memory until this Slurm job ends or runs the same command again"
    hosts = ReplacementHosts(
        allocation,
        root / arguments.job,
        shlex.split(arguments.sbatch_flags),
        arguments.hold_seconds,
    )

    def clean() -> None:
        launcher.clean()
        hosts.end()

    held = hosts if hold else None
    return RunPlace(launcher, nodes, allocation.seconds_left(), clean, clean, hint, hosts=held)


def _refuse_other_flags(arguments: argparse.Namespace) -> None:
    """ConfigError for flags of another launcher."""
    for name, launcher in _ONLY.items():
        if getattr(arguments, name) not in (None, "") and arguments.launcher != launcher:
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
    _refuse_other_flags(arguments)
    if arguments.launcher != NODES or _rank(arguments).rank == 0:
        return None
    # The supervisor drains first, and then ends us.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    rank = _rank(arguments).rank
    return _own_agent(arguments, rank, meeting_folder(arguments)).wait()


def _gather(arguments: argparse.Namespace, root: Path, folder: Path) -> RunPlace:
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
    fronts: list[AgentFront] = []

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
    launcher = AgentLauncher(arguments.job, hub, root, file, hosts)
    hint = "snapshots stay in the nodes' memory: run the same command again to continue"
    return RunPlace(launcher, nodes, 0.0, launcher.clean, launcher.clean, hint, leave=leave)


def own_address(environment: Mapping[str, str], towards: str = "") -> str:
    """The address at which other nodes reach this machine.

    That towards one of them, MASTER_ADDR if it is here, or the one towards the outside.
    """
    for host in (towards, environment.get("MASTER_ADDR", ""), _ANYWHERE):
        with suppress(OSError):
            if host:
                return address_towards(socket.gethostbyname(host))
    return "127.0.0.1"


def _rank(arguments: argparse.Namespace) -> NodeRank:
    wanted = None if arguments.nodes is None else arguments.nodes + arguments.spares
    return node_rank(os.environ, arguments.node_rank, wanted)


def _own_agent(arguments: argparse.Namespace, rank: int, folder: Path) -> AgentFront:
    name = arguments.node_name or socket.gethostname()
    return AgentFront(AgentOrders(name, rank, file=str(folder / FILE_NAME)))


def _over_remote_shells(
    arguments: argparse.Namespace, hub: AgentHub, hosts: list[str]
) -> list[AgentFront]:
    shell = shlex.split(arguments.remote_shell or _SSH)
    try:
        return [
            AgentFront(AgentOrders(host, rank, hub.meeting, folder=os.getcwd()), [*shell, host])
            for rank, host in enumerate(hosts)
        ]
    except OSError as error:
        raise ConfigError(f"--remote-shell {shell[0]!r}: {error.strerror}") from error


def _await_agents(hub: AgentHub, fronts: list[AgentFront], size: int) -> None:
    """Wait until all agents are there, or no more can be expected."""
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
        say(f"megatron-ft: {said}; continuing without", sys.stderr)
