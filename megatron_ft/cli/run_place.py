"""Where ``megatron-ft run`` runs a job: virtual nodes, a Slurm allocation, nodes with agents."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.cli import agent_place
from megatron_ft.cli.agent_place import HOSTFILE, NODES
from megatron_ft.cli.say import say
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fewer_ranks import HOLD, STOP
from megatron_ft.core.node_names import check_sockets
from megatron_ft.launchers.launcher import HostSource, Launcher
from megatron_ft.launchers.slurm.allocation import Allocation
from megatron_ft.launchers.slurm.launcher import SlurmLauncher
from megatron_ft.launchers.slurm.replacement import ReplacementHosts
from megatron_ft.launchers.virtual import VirtualCluster, default_root
from megatron_ft.supervisor.job_state import make_notes_folder

VIRTUAL, SLURM = "virtual", "slurm"
VIRTUAL_NODES = 4
HOLD_SECONDS = 600.0


@dataclass(frozen=True)
class RunPlace:
    """A launcher, how many nodes train, and what only the place knows.

    ``seconds_left`` until it ends the job, 0: never.  ``clean`` removes what a job that is done
    left on its nodes; ``destroy`` also ends its processes.  ``hint`` says what becomes of
    memory when the job has stopped.  ``hosts`` is where replacements of lost nodes come from.
    ``leave`` takes the exit code to all nodes, at the very end.
    """

    launcher: Launcher
    nodes: int
    seconds_left: float
    clean: Callable[[], None]
    destroy: Callable[[], None]
    hint: str
    hosts: HostSource | None = None
    leave: Callable[[int], None] = lambda code: None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a place."""
    parser.add_argument(
        "--launcher",
        choices=(VIRTUAL, SLURM, NODES, HOSTFILE),
        default=VIRTUAL,
        help="virtual: nodes are groups of processes of this machine; slurm: those of the "
        "allocation that this runs in; nodes: those on which mpirun, torchrun, deepspeed or srun "
        "has started this same command, once on each; hostfile: those in --hostfile (default: "
        "%(default)s; docs/launchers.md)",
    )
    agent_place.add_arguments(parser)
    parser.add_argument(
        "--srun-flags",
        default="",
        metavar="FLAGS",
        help="more flags for each srun, as one word: --srun-flags='--container-image=...'",
    )
    parser.add_argument(
        "--hold-seconds",
        type=float,
        default=HOLD_SECONDS,
        help="longest wait of --on-no-spare hold, then stop (%(default)g)",
    )
    parser.add_argument(
        "--sbatch-flags",
        default="",
        metavar="FLAGS",
        help="more flags for the sbatch of a replacement host, as one word: "
        "--sbatch-flags=--gpus-per-node=8",
    )


def place_of(
    arguments: argparse.Namespace,
    root: Path | None,
    state_folder: Path,
    meeting_folder: Path,
    on_no_spare: str = STOP,
) -> RunPlace:
    """What the flags ask for; ``root`` is the folder of all jobs' arenas, None: the usual one.

    Agents meet the supervisor in ``meeting_folder``; ``on_no_spare`` is the job's setting.
    ConfigError for flags that do not fit the place.
    """
    root, hold = root or default_root(), on_no_spare == HOLD
    if arguments.launcher == SLURM:
        return _slurm(arguments, root, state_folder, hold)
    _refuse_slurms(arguments, hold)
    if arguments.launcher in (NODES, HOSTFILE):
        return _with_agents(arguments, root, meeting_folder)
    nodes: int = VIRTUAL_NODES if arguments.nodes is None else arguments.nodes
    names = [f"node{i}" for i in range(nodes + arguments.spares)]
    cluster = VirtualCluster(arguments.job, names, root)
    hint = (
        "snapshots stay in memory: run the same command again to go on, or free it with "
        f"`megatron-ft clean --job {arguments.job}`"
    )
    return RunPlace(cluster, nodes, 0.0, cluster.clean, cluster.destroy, hint)


def _refuse_slurms(arguments: argparse.Namespace, hold: bool) -> None:
    given = {
        "--srun-flags": arguments.srun_flags,
        "--sbatch-flags": arguments.sbatch_flags,
        "--on-no-spare hold": hold,
    }
    for flag in (name for name, value in given.items() if value):
        raise ConfigError(f"{flag} needs --launcher slurm")


def _with_agents(arguments: argparse.Namespace, root: Path, meeting_folder: Path) -> RunPlace:
    place = agent_place.gather(arguments, root, meeting_folder)
    clean = place.launcher.clean
    hint = "snapshots stay in the nodes' memory: run the same command again to go on"
    return RunPlace(place.launcher, place.nodes, 0.0, clean, clean, hint, leave=place.leave)


def _slurm(arguments: argparse.Namespace, root: Path, state_folder: Path, hold: bool) -> RunPlace:
    allocation = Allocation.from_environment()
    there = len(allocation.names)
    if int(os.environ.get("SLURM_HET_SIZE", "1")) > 1:
        say(
            f"megatron-ft: job {allocation.job_id} is heterogeneous; only the nodes of this "
            f"component are used: {', '.join(allocation.names)}"
        )
    nodes: int = there - arguments.spares if arguments.nodes is None else arguments.nodes
    if nodes < 1 or nodes + arguments.spares > there:
        raise ConfigError(
            f"job {allocation.job_id} has {there} nodes, not enough for {nodes} that train and "
            f"{arguments.spares} spares: give sbatch a larger --nodes"
        )
    flags = shlex.split(arguments.srun_flags)
    notes = state_folder.with_name(f"{state_folder.name}.nodes")
    check_sockets(root, arguments.job, allocation.names)
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
