"""Turn a snapshot into a checkpoint that the training framework loads itself.

  megatron-ft export --job NAME --to DIR
  megatron-ft export --from DRAINED --to DIR --iteration 2000

Reads the memory of a job that runs (snapshots that need the memory being read are skipped
meanwhile) or has stopped, or a checkpoint that was drained, and writes Megatron-LM's
distributed checkpoint: unmodified Megatron continues from it with `--load DIR`.  No trainer
and no GPU is needed, but the release of Megatron that trained is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.disk import native
from megatron_ft.disk.checkpoint import open_checkpoint
from megatron_ft.disk.live import open_live
from megatron_ft.disk.source import OpenSnapshot, SnapshotSource, open_newest
from megatron_ft.errors import ConfigError
from megatron_ft.launch.job_state import known_shards
from megatron_ft.launch.virtual import default_root

FORMATS = ("torch_dist",)

EXIT_CODES: Mapping[int, str] = {
    2: "nothing was written: no such snapshot, not enough recorded with it, or another release of "
    "Megatron; the message says what"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft export``."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--job", default="job", help="job whose memory is read (%(default)s)")
    source.add_argument(
        "--from", dest="source", type=Path, metavar="DRAINED", help="drained checkpoint instead"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write")
    parser.add_argument(
        "--format", choices=FORMATS, default=FORMATS[0], help="of the files (%(default)s)"
    )
    parser.add_argument("--iteration", type=int, help="this one instead of the newest")
    parser.add_argument("--arena-dir", type=Path, help="the --arena-dir of the job, if it has one")
    parser.add_argument("--state-dir", type=Path, help="the --state-dir of the job, if it has one")


def main(arguments: argparse.Namespace) -> int:
    """Export one snapshot; prints the folder."""
    started = time.monotonic()
    with open_newest(_source(arguments), arguments.iteration) as shards:
        iteration, count = shards.info.iteration, len(shards)
        folder = native.checkpoint_folder(arguments.to.absolute(), iteration)
        if folder.exists():
            raise ConfigError(f"{folder} exists already; export to another folder, or remove it")
        _export(shards, folder)
    native.point_tracker(folder.parent, iteration)
    seconds = time.monotonic() - started
    print(f"iteration {iteration}: {count} shards in {seconds:.1f} s: {folder}")
    print(f"continue with: --load {folder.parent}")
    return 0


def _export(shards: OpenSnapshot, folder: Path) -> None:
    # Imported late: whatever was wrong with the source is said before torch is there.
    from megatron_ft.megatron.export.write import export

    export(shards, folder)


def _source(arguments: argparse.Namespace) -> SnapshotSource:
    if arguments.source is not None:
        return open_checkpoint(arguments.source)
    known = known_shards(arguments.job, arguments.state_dir)
    return open_live(arguments.arena_dir or default_root(), arguments.job, shards=known)
