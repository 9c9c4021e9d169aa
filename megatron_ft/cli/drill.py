"""A fire drill: act as if a shard were lost, rebuild it from parity, compare with the live one.

  megatron-ft drill --job NAME

Works while the job runs (snapshots that need the memory being read are skipped meanwhile)
and on what a stopped job keeps in memory.  The shard, and the members from which each part is
rebuilt, are drawn by lot.  Nothing is written, and no memory is needed that grows with the
shard.  All arenas of the stripe must be on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
from collections.abc import Mapping
from dataclasses import asdict

from megatron_ft.checkpoint.live import node_folders
from megatron_ft.checkpoint.memory_drill import DrillReport, run_drill
from megatron_ft.cli import common
from megatron_ft.core.errors import ConfigError, SnapshotUnavailableError
from megatron_ft.core.pace import Pace
from megatron_ft.core.priority import lower_priority

EXIT_CODES: Mapping[int, str] = {
    3: "what was rebuilt is not what is there, or a source is damaged",
    4: "there is no protected snapshot to drill on",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft drill``."""
    parser.add_argument("--job", default="job", help="name of the job (default: %(default)s)")
    common.add_argument(parser)
    parser.add_argument("--shard", default="", help="the shard to lose instead of a random one")
    parser.add_argument("--seed", type=int, help="repeats the drill that printed it")
    parser.add_argument(
        "--bandwidth-mib",
        type=float,
        default=0.0,
        help="most MiB/s that are rebuilt, 0 for no limit (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Drill once; see EXIT_CODES."""
    folders = node_folders(common.root_of(arguments) / arguments.job)
    if not folders:
        raise ConfigError(
            f"no arenas of a job {arguments.job!r} here; `megatron-ft status` lists the jobs, "
            "--arena-dir names another folder"
        )
    lower_priority()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    pace = Pace(arguments.bandwidth_mib * (1 << 20))
    try:
        report = run_drill(folders, random.Random(seed), shard=arguments.shard, pace=pace.after)
    except SnapshotUnavailableError as error:
        print(json.dumps({"seed": seed, "problem": str(error)}) if arguments.json else error)
        return 4
    if arguments.json:
        print(json.dumps({"seed": seed, **asdict(report)}))
    else:
        print(render(report, seed))
    return 3 if report.problem else 0


def render(report: DrillReport, seed: int) -> str:
    """The result as text."""
    what = f"snapshot {report.snapshot} (iteration {report.iteration}), seed {seed}"
    lost = f"{report.shard_id} of node {report.node}"
    if report.problem:
        return f"drill on {what}: {lost} could not be had back: {report.problem}"
    size = report.bytes / (1 << 20)
    rate = size / max(report.seconds, 1e-9)
    used = sorted({shard for row in report.sources for shard in row})
    return (
        f"drill on {what}: {lost} was rebuilt from {', '.join(used)}: {size:.1f} MiB in "
        f"{report.seconds:.2f} s ({rate:.0f} MiB/s), every byte as it is there"
    )
