"""Run a training command under protection.

  megatron-ft run --nodes 4 --spares 1 --protect rs:3+1 -- python train.py ...

Starts an SMP on every node, an encoder world over MPI (over TCP where there is none) and one
trainer per rank with torchrun's environment variables; notices deaths, replaces nodes, restarts
from memory.
Nodes are virtual (groups of processes of this machine) by default.  They are those of the Slurm
job in whose batch script this runs (docs/how-to/slurm.md), or those on which another launcher
started an agent (docs/how-to/launchers.md).  If this command itself is killed, run it again with
the same --job, or without one in the same folder: it takes over the snapshots in memory.

Settings may stand in the training command instead, as --inmem-<name>, and then must not
contradict these.  The environment (MEGATRON_FT_<NAME>) gives the settings without a flag.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_ft.cli import run_place
from megatron_ft.cli.common import say
from megatron_ft.cli.console import Console
from megatron_ft.cli.parser import HELP_ALL, for_few, seconds
from megatron_ft.cli.run_folders import RunSummary, folders_ready, make_folder
from megatron_ft.cli.run_place import RunPlace
from megatron_ft.cli.shapes import read_shapes
from megatron_ft.cli.training_command import (
    check_command,
    check_torchrun,
    command_of,
    job_name,
    settle,
    settle_ranks,
)
from megatron_ft.config import SnapshotConfig
from megatron_ft.config.flags import argument_type, help_of
from megatron_ft.config.setting import FOLDER
from megatron_ft.config.settings import ADVANCED, settings_by_group
from megatron_ft.core import isal
from megatron_ft.core.errors import (
    ConfigError,
    MegatronFTError,
    RestartBudgetError,
    SchedulerAwayError,
    UnrecoverableError,
)
from megatron_ft.core.identity import MAY_SHRINK
from megatron_ft.launchers.slurm.allocation import NO_KILL_ADVICE, no_kill
from megatron_ft.launchers.virtual import visible_devices
from megatron_ft.supervisor.event_log import EVENTS, EventLog
from megatron_ft.supervisor.events import (
    StoppedEvent,
)
from megatron_ft.supervisor.failure_domains import read_domains
from megatron_ft.supervisor.job_state import JobState, state_folder
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.metrics import JobMetrics
from megatron_ft.supervisor.notify import DEFAULT_KINDS, Notifier, kinds_of
from megatron_ft.supervisor.outcome import Outcome
from megatron_ft.supervisor.spec import JobSpec, raise_open_files
from megatron_ft.supervisor.supervisor import (
    EXIT_CONTINUE,
    EXIT_DRAINED,
    EXIT_INTERRUPTED,
    EXIT_NOT_DRAINED,
    EXIT_SCHEDULER,
    Stop,
    Supervisor,
)

EXIT_UNRECOVERABLE, EXIT_NO_SPARE, EXIT_BUDGET = 10, 11, 12
EXIT_CODES: Mapping[int, str] = {
    EXIT_UNRECOVERABLE: "stopped: no snapshot in memory can be served and no checkpoint was found",
    EXIT_NO_SPARE: "stopped: a node is lost and no spare is left",
    EXIT_BUDGET: "stopped: training cannot start, or fails again and again without progress",
    EXIT_DRAINED: "stopped by SIGTERM: the newest committed snapshot is in --drain-dir",
    EXIT_NOT_DRAINED: "stopped by SIGTERM: no snapshot was drained: none existed, or time ran out "
    "(--drain-stop-seconds)",
    EXIT_CONTINUE: "training stopped itself before its planned end: run the same command to "
    "continue",
    EXIT_SCHEDULER: "stopped: the scheduler was away for too long; run the same command again",
    EXIT_INTERRUPTED: "interrupted, or stopped by SIGTERM without --drain-dir",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft run``, in groups."""
    parser.usage = "%(prog)s [flags] -- COMMAND ..."
    parser.add_argument(HELP_ALL, action="help", help="show also the flags that few need")
    _add_job(parser)
    run_place.add_arguments(parser)
    _add_settings(parser)
    _add_commands(parser.add_argument_group("commands of yours"))
    parser.add_argument(
        "training_command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the training"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the job")
    group.add_argument(
        "--job",
        help="name of the job (default: that of the script, with a number that follows from the "
        "user, the working folder and the training command)",
    )
    parser.set_defaults(job_of=job_name)
    group.add_argument(
        "--nodes",
        type=int,
        help=f"nodes that train (default: {run_place.VIRTUAL_NODES}; with --launcher slurm all of "
        "the allocation but the spares)",
    )
    group.add_argument(
        "--spares", type=int, default=0, help="nodes in reserve (default: %(default)s)"
    )
    group.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="trainers a node (default: torchrun's --nproc-per-node in the command, else 1)",
    )
    group.add_argument(
        "--failure-domains",
        metavar="FILE",
        help="which nodes fail together: a file of lines `rack1: node[0-3],node7` (default: each "
        "node is alone)",
    )
    group.add_argument(
        "--shapes",
        metavar="FILE",
        help="arguments to add to the training command when the job continues with fewer nodes: a "
        'file like {"3": ["--flag", "value"], "2": null}; with null it never uses that number',
    )
    group.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where the job's notes are kept; all nodes must see it",
    )
    group.add_argument("--log-dir", type=Path, metavar="DIR", help="where the output goes")
    group.add_argument(
        "--from-scratch",
        action="store_true",
        help="when neither memory nor disk has a state, start again from nothing",
    )
    group.add_argument(
        "--free-on-exit",
        action="store_true",
        help="take every end with exit code 0 for the planned end of training: the memory is freed",
    )
    group.add_argument(
        "--restore-from",
        type=_folder,
        metavar="DIR",
        help="a drained checkpoint, of any job of the same shape, to start from when the job has "
        "nothing newer of its own",
    )
    group.add_argument(
        "--trainer-per-node",
        action="store_true",
        help=for_few(
            parser,
            "start the command once per node: it is a script that runs torchrun, which starts the "
            "node's trainers (set by itself where the command is torchrun)",
        ),
    )
    group.add_argument(
        "--warm-start",
        choices=("on", "off"),
        default="on",
        help=for_few(
            parser,
            "fork trainers from a process on each node that has imported what they need, if the "
            "command is a Python script or module (default: on)",
        ),
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for title, settings in settings_by_group().items():
        group = parser.add_argument_group(title)
        for setting in settings:
            text = help_of(setting)
            group.add_argument(
                setting.run_flag,
                type=argument_type(setting),
                metavar=setting.metavar,
                help=for_few(parser, text) if title == ADVANCED else text,
            )


def _add_commands(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--notify-command",
        metavar="CMD",
        help="a shell command to run for an event, which it gets as JSON on its standard input",
    )
    group.add_argument(
        "--notify-on",
        metavar="KINDS",
        type=_kinds,
        default=DEFAULT_KINDS,
        help=f"kinds of events for --notify-command (default: {', '.join(DEFAULT_KINDS)})",
    )
    group.add_argument(
        "--metrics",
        metavar="PORT|FILE",
        help="serve Prometheus metrics at this port of this machine, or write them to a file for "
        "node_exporter every ten seconds; needs the extra [metrics]",
    )
    group.add_argument(
        "--metrics-token-file",
        metavar="FILE",
        type=Path,
        help="open the --metrics port to other machines, for requests with the token in this file",
    )
    group.add_argument(
        "--health-command",
        metavar="CMD",
        type=_health_command,
        help="a shell command to run on each node before each start: a node where it fails is not "
        "used while a spare is free",
    )
    group.add_argument(
        "--health-seconds",
        type=seconds,
        metavar="SECONDS",
        default=30.0,
        help="longest run of the health command; it is killed then, and the node counts as unknown "
        "(default: %(default)g)",
    )


def _folder(text: str) -> Path:
    try:
        return Path(FOLDER.convert(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _health_command(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the health command is empty")
    return text


def _kinds(text: str) -> tuple[str, ...]:
    try:
        return kinds_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: argparse.Namespace) -> int:
    if arguments.metrics_token_file and not arguments.metrics:
        raise ConfigError("--metrics-token-file is for --metrics PORT, which is not given")
    command = command_of(arguments)
    settings = settle(vars(arguments), command, os.environ)
    code = run_place.serve(arguments)
    if code is not None:
        return code
    say(f"megatron-ft: job {arguments.job}")
    notes = state_folder(arguments.job, arguments.state_dir)
    meeting = run_place.meeting_folder(arguments)
    try:
        place = run_place.place_of(
            arguments, settings.arena_dir, notes, meeting, settings.on_no_spare
        )
    except SchedulerAwayError as error:
        say(f"megatron-ft: stopped: {error}")
        return EXIT_SCHEDULER
    if arguments.launcher == run_place.SLURM and no_kill() is False:
        say(
            "megatron-ft: warning: --no-kill is not seen: without it Slurm kills the whole job, "
            f"and its memory, when a node is lost; {NO_KILL_ADVICE}"
        )
    _warn_of_shared_devices(arguments, place.nodes)
    code = 1
    try:
        code = _supervise(arguments, command, settings, place)
    finally:
        place.leave(code)
    return code


def _warn_of_shared_devices(arguments: argparse.Namespace, nodes: int) -> None:
    if arguments.launcher != run_place.VIRTUAL:
        return
    ranks, devices = nodes * (arguments.ranks_per_node or 1), len(visible_devices(os.environ))
    if 0 < devices < ranks:
        say(
            f"megatron-ft: warning: {ranks} ranks share {devices} GPUs, which NCCL refuses: give "
            "fewer --nodes, or let the training command use gloo"
        )


def _supervise(
    arguments: argparse.Namespace,
    command: Sequence[str],
    settings: SnapshotConfig,
    place: RunPlace,
) -> int:
    notes = state_folder(arguments.job, arguments.state_dir)
    with _leaving_nothing(place):
        nodes = place.launcher.nodes()
        spec = spec_from(arguments, command, settings, place.nodes, nodes, place.seconds_left)
        if arguments.launcher == run_place.VIRTUAL:
            check_command(command)
        raise_open_files()
        make_folder("--log-dir", arguments.log_dir)
    with JobState(notes, spec.name) as state, ExitStack() as held:
        with _leaving_nothing(place):
            held.enter_context(folders_ready(spec, state))
        supervisor = Supervisor(spec, place.launcher, state, place.hosts)
        supervisor.observers.subscribe(Console(say).on_event)
        EventLog(notes / EVENTS, str(state.record.job)).follow(supervisor.fleet)
        if arguments.notify_command:
            held.callback(_notifier(arguments, supervisor).close)
        if arguments.metrics:
            with _leaving_nothing(place):
                held.enter_context(_metrics_of(arguments, supervisor))
        supervisor.observers.subscribe(end := RunSummary())
        try:
            code, ended = asyncio.run(_run(supervisor))
        except MegatronFTError:
            # SMPs that were started, or taken over, continue keeping what they have.
            if state.record.smps:
                say(place.hint)
            else:
                place.clean()
            raise
        for line in end.lines():
            say(line)
        untold = ended is not Outcome.UNKNOWN and not state.record.committed
        if untold and (code in (0, EXIT_INTERRUPTED) or end.trained):
            say(end.unprotected())
        elif state.record.committed and code:
            say(place.hint)
        if ended is Outcome.FINISHED:
            state.remove()
        if (ended is not None and ended.frees) or not state.record.smps:
            place.clean()
    return code


def _notifier(arguments: argparse.Namespace, supervisor: Supervisor) -> Notifier:
    return Notifier(
        arguments.notify_command,
        arguments.notify_on,
        str(supervisor.state.record.job),
        supervisor.fleet,
    )


def _metrics_of(
    arguments: argparse.Namespace, supervisor: Supervisor
) -> AbstractContextManager[Any]:
    # http.server takes 50 ms to import, which other jobs need not pay.
    from megatron_ft.supervisor.metrics_outlet import outlet

    metrics = JobMetrics(arguments.job)
    supervisor.observers.subscribe(metrics.observe)
    supervisor.summary.subscribe(metrics.update)
    return closing(outlet(metrics.page, arguments.metrics, arguments.metrics_token_file))


@contextmanager
def _leaving_nothing(place: RunPlace) -> Iterator[None]:
    """Remove the folder of a job that is refused in this block, if it is empty: not in use."""
    try:
        yield
    except MegatronFTError:
        for node in place.launcher.nodes()[:1]:
            with suppress(OSError):
                place.launcher.node_dir(node).parent.rmdir()
        raise


def spec_from(
    arguments: argparse.Namespace,
    command: Sequence[str],
    settings: SnapshotConfig,
    nodes: int,
    names: Sequence[str],
    seconds_left: float = 0.0,
) -> JobSpec:
    """The job that flags and settings describe, on ``nodes`` of those with these names.

    The place ends it after ``seconds_left``, 0: never.  ConfigError or ProtectionError if it makes
    no sense.
    """
    isal.load()  # Digests and parity need it: where it is missing, say so before anything starts.
    settle_ranks(arguments, command)
    source, shrinks = arguments.failure_domains, settings.on_no_spare in MAY_SHRINK
    check_torchrun(command, nodes, arguments.ranks_per_node, fewer=shrinks)
    if arguments.shapes and not shrinks:
        raise ConfigError(
            "--shapes has no effect: the job may not continue with fewer nodes; add --on-no-spare "
            "shrink or auto"
        )
    # A flag of the same name as a field needs no line here.
    given = {f.name: getattr(arguments, f.name) for f in fields(JobSpec) if f.name in arguments}
    log_dir = arguments.log_dir or state_folder(arguments.job, arguments.state_dir) / "logs"
    computed: dict[str, Any] = {
        "name": arguments.job,
        "command": tuple(command),
        "nodes": nodes,
        "warm_start": arguments.warm_start == "on",
        "settings": settings,
        "log_dir": log_dir,
        "domains": read_domains(source, names) if source else {},
        "shapes": read_shapes(arguments.shapes, nodes, arguments.ranks_per_node, command),
        "place_seconds": seconds_left,
        "health_command": arguments.health_command or "",
    }
    return JobSpec(**{**given, **computed})


_STOPPED: Mapping[type[Exception], int] = {
    UnrecoverableError: EXIT_UNRECOVERABLE,
    NoSpareError: EXIT_NO_SPARE,
    RestartBudgetError: EXIT_BUDGET,
    SchedulerAwayError: EXIT_SCHEDULER,
}


async def _run(supervisor: Supervisor) -> tuple[int, Outcome | None]:
    """The exit code, and how training ended if all ranks exited with 0."""
    task = asyncio.ensure_future(supervisor.run())
    stop, loop = Stop(supervisor, task), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.at_once)
    loop.add_signal_handler(signal.SIGTERM, stop.after_drain)
    ended: Outcome | None = None
    try:
        ended = await task
        if ended is not Outcome.EARLY:
            return 0, ended
        code, text = EXIT_CONTINUE, supervisor.ending.text
    except asyncio.CancelledError:
        code, text = stop.code, f"{EXIT_CODES[stop.code]}; trainers are stopped"
    except Exception as error:
        if type(error) not in _STOPPED:
            ours = isinstance(error, MegatronFTError)
            text = str(error) if ours else f"{type(error).__name__}: {error}"
            supervisor.observers.emit(StoppedEvent(code=2 if ours else 1), text)
            raise
        code, text = _STOPPED[type(error)], f"megatron-ft: stopped: {error}"
    say(text)
    supervisor.observers.emit(StoppedEvent(code=code), text)
    return code, ended
