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
from dataclasses import replace

from megatron_ft.checkpoint.drained import of_one_job
from megatron_ft.cli import run, run_place
from megatron_ft.cli.doctor.checks import judge
from megatron_ft.cli.doctor.examine import Examination
from megatron_ft.cli.doctor.facts import AskedJob, Facts, ProbeRequest
from megatron_ft.cli.doctor.report import Severity, as_json, render, worst
from megatron_ft.cli.run_folders import make_folder
from megatron_ft.cli.run_place import RunPlace
from megatron_ft.cli.training_command import command_of, settle, settle_ranks
from megatron_ft.config import SnapshotConfig, json_section
from megatron_ft.config.flags import read_command
from megatron_ft.core.errors import ControlPlaneError, ProtectionError
from megatron_ft.core.identity import MAY_SHRINK
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers.virtual import default_root
from megatron_ft.megatron import fewer_ranks
from megatron_ft.supervisor.job_state import read_record, state_folder
from megatron_ft.supervisor.seats import choose_active

EXIT_CODES: Mapping[int, str] = {
    0: "nothing is refused (there may be warnings)",
    1: "something is refused: the job would fail, or lose its memory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
            if arguments.restore_from is not None:
                of_one_job(arguments.restore_from)
            job = asked_job(arguments, settings, command, place)
            request = ProbeRequest(f".{name}", str(root), job.folders)
            return await Examination(place.launcher, job, logs, request).run()
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


def asked_job(
    arguments: argparse.Namespace,
    settings: SnapshotConfig,
    command: Sequence[str],
    place: RunPlace,
) -> AskedJob:
    """The job; ConfigError where ``megatron-ft run`` refuses it, but for a missing command."""
    nodes, wanted = place.launcher.nodes(), (command or ("python",), settings)
    try:
        spec = run.spec_from(arguments, *wanted, place.nodes, nodes)
        make_folder("--drain-export-dir", settings.drain_export_dir)
    except ProtectionError:
        # Stripes that cannot be made are a finding of their own.
        wanted = (wanted[0], replace(settings, protect="none"))
        spec = run.spec_from(arguments, *wanted, place.nodes, nodes)
    scheme, record = Scheme.parse(settings.protect), None
    active = choose_active(nodes, place.nodes, spec.domains, scheme)
    with suppress(ControlPlaneError):  # ``run`` refuses notes that cannot be read
        record = read_record(state_folder(arguments.job, arguments.state_dir), arguments.job)
    section, enabled = json_section.read_command(command), read_command(command).enabled
    shrinks = settings.on_no_spare in MAY_SHRINK
    megatron = fewer_ranks.arguments_of(command) if enabled and shrinks else None
    refusals = [] if megatron is None else fewer_ranks.refusals(megatron)
    sizes = arguments.shard_gib, arguments.parameters, place.nodes * arguments.ranks_per_node
    return AskedJob(
        spec=spec,
        scheme=scheme,
        active=tuple(active),
        spares=tuple(n for n in nodes if n not in active),
        shard_bytes=shard_size(*sizes),
        domains_from=arguments.failure_domains or "",
        noted=None if record is None else record.job,
        megatron=enabled,
        deepspeed=section is not None and section.enabled,
        rank_rule=None if megatron is None or refusals else fewer_ranks.rule_of(megatron),
        shrink_refusals=tuple(refusals),
    )


BYTES_PER_PARAMETER = 12


def shard_size(shard_gib: float, parameters: float, ranks: int) -> int:
    """Bytes of state of one rank, 0 if unknown.

    A shard under Adam with a distributed optimizer is the fp32 master and two moments of the rank's
    share of parameters; weights in bf16 follow from the masters.
    """
    return round(shard_gib * (1 << 30)) or round(BYTES_PER_PARAMETER * parameters / ranks)
