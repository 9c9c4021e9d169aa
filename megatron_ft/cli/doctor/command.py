"""Say before training whether the nodes are fit for it, and what to do where they are not.

  megatron-ft doctor --nodes 4 --spares 1 --protect rs:3+1 -- python train.py ...

Takes what `megatron-ft run` takes: write `doctor` for `run` in your launch line.  The training
command is not run; its settings are read, and its Python is asked for its versions.  Each
line is ok, a warning, or refused: refused is what would fail the job or lose its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from megatron_ft.checkpoint.drained import of_one_job
from megatron_ft.cli import run, run_place
from megatron_ft.cli.doctor.checks import judge
from megatron_ft.cli.doctor.examine import Examination
from megatron_ft.cli.doctor.facts import Facts, ProbeRequest, Wishes
from megatron_ft.cli.doctor.report import Severity, as_json, render, worst
from megatron_ft.cli.run_folders import make_folder
from megatron_ft.cli.run_place import RunPlace
from megatron_ft.cli.shapes import read_shapes
from megatron_ft.cli.training_command import command_of, settle, settle_ranks
from megatron_ft.config import SnapshotConfig, json_section
from megatron_ft.config.flags import read_command
from megatron_ft.core.errors import ControlPlaneError, ProtectionError
from megatron_ft.core.identity import MAY_SHRINK
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers.container import python_of
from megatron_ft.launchers.virtual import default_root
from megatron_ft.megatron import fewer_ranks
from megatron_ft.supervisor.failure_domains import read_domains
from megatron_ft.supervisor.job_state import read_record, state_folder
from megatron_ft.supervisor.seats import choose_active
from megatron_ft.supervisor.slot_choice import USUAL

EXIT_CODES: Mapping[int, str] = {
    0: "nothing is refused (there may be warnings)",
    1: "something is refused: the job would fail, or lose its memory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft run``, and those of the doctor alone."""
    group = parser.add_argument_group("only of the doctor")
    group.add_argument("--json", action="store_true", help="print the findings as JSON")
    group.add_argument(
        "--shard-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="state of one rank, as `status` shows it",
    )
    group.add_argument(
        "--parameters",
        type=float,
        default=0.0,
        metavar="N",
        help="parameters of the model instead, for example 7e9: 12 bytes each, shared by all ranks "
        "(Adam under a distributed optimizer)",
    )
    run.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Ask every node, print the findings; see EXIT_CODES."""
    command = command_of(arguments)
    settle_ranks(arguments, command)
    settings = settle(vars(arguments), command, os.environ)
    code = run_place.serve(arguments)
    if code is not None:
        return code
    findings = judge(asyncio.run(examine(arguments, settings, command)))
    print(json.dumps(as_json(findings), indent=1) if arguments.json else render(findings))
    return 1 if worst(findings) is Severity.REFUSED else 0


async def examine(
    arguments: argparse.Namespace, settings: SnapshotConfig, command: Sequence[str]
) -> Facts:
    """Ask every node as a job of a name of its own, of which nothing is left afterwards."""
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    root = settings.arena_dir or default_root()
    logs = state_folder(name, arguments.log_dir or arguments.state_dir)
    own = argparse.Namespace(**{**vars(arguments), "job": name})
    meeting = run_place.meeting_folder(arguments)
    place = run_place.place_of(own, root, logs, meeting, settings.on_no_spare)
    try:
        with _unmade(settings):
            _refuse_what_run_refuses(arguments, settings, command, place)
            wishes = wishes_of(arguments, settings, command, place)
            request = ProbeRequest(f".{name}", str(root), wishes.folders)
            return await Examination(place.launcher, wishes, command, logs, request).run()
    finally:
        place.destroy()
        place.leave(0)
        shutil.rmtree(logs, ignore_errors=True)


@contextmanager
def _unmade(settings: SnapshotConfig) -> Iterator[None]:
    """Remove the folders that are made meanwhile, if nobody has put anything into them."""
    folders = (settings.drain_dir, settings.drain_export_dir)
    ways = [one for folder in folders if folder for one in (folder, *folder.parents)]
    missing = {one for one in ways if not os.path.exists(one)}
    try:
        yield
    finally:
        for one in sorted(missing, reverse=True):
            with suppress(OSError):
                one.rmdir()


def _refuse_what_run_refuses(
    arguments: argparse.Namespace,
    settings: SnapshotConfig,
    command: Sequence[str],
    place: RunPlace,
) -> None:
    """ConfigError as of ``megatron-ft run``, whose command may be missing here."""
    if arguments.restore_from is not None:
        of_one_job(arguments.restore_from)
    # Stripes that cannot be made are a finding of their own, and so is the drain folder, which
    # each node tries.
    with suppress(ProtectionError):
        nodes = place.launcher.nodes()
        run.spec_from(arguments, command or ("python",), settings, place.nodes, nodes)
        make_folder("--drain-export-dir", settings.drain_export_dir)


def wishes_of(
    arguments: argparse.Namespace,
    settings: SnapshotConfig,
    command: Sequence[str],
    place: RunPlace,
) -> Wishes:
    """The job's wishes; ConfigError for failure domains that cannot be read."""
    source, scheme = arguments.failure_domains, Scheme.parse(settings.protect)
    nodes = place.launcher.nodes()
    domains = read_domains(source, nodes) if source else {}
    active = choose_active(nodes, place.nodes, domains, scheme)
    ranks = place.nodes * arguments.ranks_per_node
    shapes = read_shapes(arguments.shapes, place.nodes, arguments.ranks_per_node, command)
    section, record = json_section.read_command(command), None
    with suppress(ControlPlaneError):  # ``run`` refuses notes that cannot be read
        record = read_record(state_folder(arguments.job, arguments.state_dir), arguments.job)
    enabled, shrinks = read_command(command).enabled, settings.on_no_spare in MAY_SHRINK
    megatron = fewer_ranks.arguments_of(command) if enabled and shrinks else None
    refusals = [] if megatron is None else fewer_ranks.refusals(megatron)
    return Wishes(
        scheme=scheme,
        active=tuple(active),
        spares=tuple(n for n in nodes if n not in active),
        ranks_per_node=arguments.ranks_per_node,
        slot_count=settings.fixed_slots or USUAL,
        third_slot=not settings.fixed_slots and settings.drain_dir is not None,
        domains=domains,
        domains_from=source or "",
        shard_bytes=shard_size(arguments.shard_gib, arguments.parameters, ranks),
        export_dir=str(settings.drain_export_dir or ""),
        job=None if record is None else record.job,
        drain_dir=str(settings.drain_dir or ""),
        drain_keep=settings.drain_keep,
        transport=settings.transport,
        megatron=enabled,
        shrinks=shrinks,
        rank_rule=None if megatron is None or refusals else fewer_ranks.rule_of(megatron),
        shrink_refusals=tuple(refusals),
        shapes=dict(shapes),
        deepspeed=section is not None and section.enabled,
        health_command=arguments.health_command or "",
        health_seconds=arguments.health_seconds,
        command_python=not command or python_of(command) is not None,
    )


BYTES_PER_PARAMETER = 12


def shard_size(shard_gib: float, parameters: float, ranks: int) -> int:
    """Bytes of state of one rank, 0 if unknown.

    A shard under Adam with a distributed optimizer is the fp32 master and two moments of the rank's
    share of parameters; weights in bf16 follow from the masters.
    """
    return round(shard_gib * (1 << 30)) or round(BYTES_PER_PARAMETER * parameters / ranks)
