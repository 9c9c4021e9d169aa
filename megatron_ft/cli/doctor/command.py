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
from megatron_ft.cli.run_folders import EXPORTS, make_folder
from megatron_ft.cli.run_place import RunPlace
from megatron_ft.cli.training_command import check_torchrun, command_of, settle, settle_ranks
from megatron_ft.config import SETTINGS, SnapshotConfig, json_section
from megatron_ft.config.flags import read_command
from megatron_ft.core.errors import ConfigError, ControlPlaneError, ProtectionError
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers.container import python_of, runtime_of
from megatron_ft.launchers.virtual import default_root
from megatron_ft.supervisor.job_state import read_record, state_folder
from megatron_ft.supervisor.placement import choose_active, read_domains

EXIT_CODES: Mapping[int, str] = {
    0: "nothing is refused (there may be warnings)",
    1: "something is refused: the job would fail, or lose its memory",
    3: "with --strict: nothing is refused, but there are warnings",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft run``, and those of the doctor alone."""
    group = parser.add_argument_group("only of the doctor")
    group.add_argument("--json", action="store_true", help="print the findings as JSON")
    group.add_argument("--strict", action="store_true", help="exit with 3 if there are warnings")
    group.add_argument(
        "--shard-gib", type=float, metavar="GIB", help="state of one rank, as `status` shows it"
    )
    group.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="parameters of the model, for example 7e9: 12 bytes each, shared by all ranks "
        "(default: by Megatron's flags in the training command)",
    )
    group.add_argument(
        "--rate-mib",
        type=int,
        default=64,
        metavar="MIB",
        help="how much is copied, coded and written to measure rates (%(default)s)",
    )
    run.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Ask every node, print the findings; see EXIT_CODES."""
    if arguments.rate_mib < 1:
        raise ConfigError(f"--rate-mib is {arguments.rate_mib}; give a number >= 1")
    command = command_of(arguments)
    settle_ranks(arguments, command)
    settings = settle(vars(arguments), command, os.environ)
    code = run_place.serve(arguments)
    if code is not None:
        return code
    findings = judge(asyncio.run(examine(arguments, settings, command)))
    print(json.dumps(as_json(findings), indent=1) if arguments.json else render(findings))
    verdict = worst(findings)
    if verdict is Severity.REFUSED:
        return 1
    return 3 if arguments.strict and verdict is Severity.WARNING else 0


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
    request = ProbeRequest(
        token=f".{name}",
        arena_root=str(root),
        scheme=settings.protect,
        drain_dir=str(settings.drain_dir or ""),
        rate_bytes=arguments.rate_mib << 20,
        export_dirs=tuple(_exports(settings).values()),
    )
    try:
        with _unmade(settings):
            _refuse_what_run_refuses(arguments, settings, command, place)
            wishes = wishes_of(arguments, settings, command, place)
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
        spec = run.spec_from(arguments, command or ("python",), settings, place)
        for name in EXPORTS:
            make_folder(SETTINGS[name].run_flag, getattr(spec.settings, name))


def _exports(settings: SnapshotConfig) -> dict[str, str]:
    """Folders of exports by flag."""
    found = {SETTINGS[name].run_flag: getattr(settings, name) for name in EXPORTS}
    return {flag: str(folder) for flag, folder in found.items() if folder}


def wishes_of(
    arguments: argparse.Namespace,
    settings: SnapshotConfig,
    command: Sequence[str],
    place: RunPlace,
) -> Wishes:
    """The job's wishes; ConfigError for failure domains that cannot be read."""
    check_torchrun(command, place.nodes, arguments.ranks_per_node)
    source, scheme = arguments.failure_domains, Scheme.parse(settings.protect)
    nodes = place.launcher.nodes()
    domains = read_domains(source, nodes) if source else {}
    active = choose_active(nodes, place.nodes, domains, scheme)
    ranks = place.nodes * arguments.ranks_per_node
    size, source_of_size = shard_size(arguments.shard_gib, arguments.parameters, command, ranks)
    section, record = json_section.read_command(command), None
    with suppress(ControlPlaneError):  # ``run`` refuses notes that cannot be read
        record = read_record(state_folder(arguments.job, arguments.state_dir), arguments.job)
    return Wishes(
        scheme=scheme,
        active=tuple(active),
        spares=tuple(n for n in nodes if n not in active),
        ranks_per_node=arguments.ranks_per_node,
        slot_count=settings.slots,
        domains=domains,
        domains_from=source or "",
        shard_bytes=size,
        shard_source=source_of_size,
        exports=_exports(settings),
        job=None if record is None else record.job,
        drain_dir=str(settings.drain_dir or ""),
        drain_keep=settings.drain_keep,
        transport=settings.transport,
        megatron=read_command(command).enabled,
        deepspeed=section is not None and section.enabled,
        command_python=not command or python_of(command) is not None,
        container=runtime_of(command, arguments.srun_flags),
    )


BYTES_PER_PARAMETER = 12
_GIB = 1 << 30


def shard_size(
    shard_gib: float | None, parameters: float | None, command: Sequence[str], ranks: int
) -> tuple[int | None, str]:
    """Bytes of state of one rank, None if unknown, and where the number comes from.

    A shard under Adam with a distributed optimizer is the fp32 master and two moments of the rank's
    share of parameters; weights in bf16 follow from the masters.
    """
    if shard_gib is not None:
        return round(shard_gib * _GIB), "--shard-gib"
    source = f"--parameters {parameters:g}" if parameters is not None else ""
    if parameters is None:
        parameters = parameters_of(command)
        source = f"{parameters:.4g} parameters by the flags of the training command"
    if not parameters:
        return None, ""
    share = round(BYTES_PER_PARAMETER * parameters / ranks)
    return share, f"{source} x {BYTES_PER_PARAMETER} bytes / {ranks} ranks"


def parameters_of(command: Sequence[str]) -> float:
    """Parameters of a dense GPT by Megatron's flags, 0 where they do not tell.

    Per layer: attention 2 h^2 (1 + g/a) for g of a heads with keys and values of their own,
    MLP 2 h f, or 3 h f gated; then the vocabulary times h, twice if it is not shared.
    Biases and norms are below one in a thousand of that and left out.
    """
    flags = _flags(command)
    layers, hidden, vocabulary = (
        _number(flags, name) for name in ("num-layers", "hidden-size", "vocab-size")
    )
    if "num-experts" in flags or not layers or not hidden:
        return 0.0
    gated = "swiglu" in flags
    wide = _number(flags, "ffn-hidden-size") or 4 * hidden
    heads = _number(flags, "num-attention-heads") or 1
    groups = (_number(flags, "num-query-groups") or 1) if "group-query-attention" in flags else 0
    attention = 2 * hidden**2 * (1 + (groups / heads if groups else 1))
    tables = 2 if "untie-embeddings-and-output-weights" in flags else 1
    layer = attention + (3 if gated else 2) * hidden * wide
    return layers * layer + tables * vocabulary * hidden


def _flags(command: Sequence[str]) -> Mapping[str, str]:
    """``--flag value`` and ``--flag=value``, without the dashes; a switch has its next word."""
    found = {}
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if equals else after
    return found


def _number(flags: Mapping[str, str], name: str) -> float:
    try:
        return float(flags.get(name, 0))
    except ValueError:
        return 0.0
