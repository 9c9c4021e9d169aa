"""Write the newest committed snapshot of a job to disk, now.

  megatron-ft drain --job NAME --to DIR

Works while the job runs (snapshots that need the memory being read are skipped meanwhile)
and on what a stopped job keeps in memory.  Makes one folder in DIR, complete when it has a
manifest.  Give another folder than the job's --drain-dir: there the job itself tidies up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_ft.checkpoint.disk_format import folder_name, is_complete
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import remove_checkpoint
from megatron_ft.checkpoint.source import OpenSnapshot, open_newest
from megatron_ft.cli import common
from megatron_ft.core.background import Pace
from megatron_ft.core.errors import DrainError, SnapshotUnavailableError
from megatron_ft.core.identity import ShardPlacement
from megatron_ft.supervisor.job_state import known_shards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job_name(parser)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write")
    parser.add_argument("--iteration", type=int, help="this one instead of the newest")
    common.add_folders(parser)
    parser.add_argument(
        "--bandwidth-mib",
        type=float,
        default=0.0,
        help="most MiB/s, 0 for no limit (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    source, seats = common.open_memory(arguments), known_shards(arguments.job, arguments.state_dir)
    started = time.monotonic()
    with open_newest(source, arguments.iteration) as shards:
        name = folder_name(shards.job, shards.info.iteration, shards.info.snapshot)
        folder = arguments.to.absolute() / name
        if is_complete(folder):
            print(f"iteration {shards.info.iteration} is there already: {folder}")
            return 0
        written = _write(shards, folder, Pace(arguments.bandwidth_mib * (1 << 20)), seats)
    print(
        f"iteration {shards.info.iteration}: {len(shards)} shards, {written / (1 << 20):.1f} MiB "
        f"in {time.monotonic() - started:.1f} s: {folder}"
    )
    return 0


def _write(
    shards: OpenSnapshot, folder: Path, pace: Pace, seats: Mapping[str, ShardPlacement]
) -> int:
    try:
        written = write_shards(shards, folder, pace=pace, seats=seats)
        publish(folder, shards.info, shards.job, shards.lineage, len(shards))
    except (OSError, DrainError, SnapshotUnavailableError) as error:
        # On a disk that fails, what is left has no manifest at least.  With one it was finished
        # by another drain of the same snapshot, and stays.
        with suppress(OSError):
            if folder.is_dir() and not is_complete(folder):
                remove_checkpoint(folder)
        raise DrainError(f"nothing was written to {folder.parent}: {error}") from error
    return written
