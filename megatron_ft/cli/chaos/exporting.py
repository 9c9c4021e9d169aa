"""A checkpoint format for jobs of no framework, so that exports can be struck, too.

    python -m megatron_ft.cli.chaos.exporting export PLAN

It is megatron_ft.checkpoint.export_drained with one format more: the sealed bytes of each shard, in
a file of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ft.checkpoint import export_drained, native
from megatron_ft.checkpoint.drain import run_step
from megatron_ft.checkpoint.export import CheckpointForm, add_format, whole_folder
from megatron_ft.checkpoint.source import OpenSnapshot

FRAMEWORK = "megatron-ft-chaos"
MODULE = "megatron_ft.cli.chaos.exporting"


def form(rank: int) -> bytes:
    """What a rank records of its checkpoint."""
    return CheckpointForm(framework=FRAMEWORK, release="1", rank=rank).to_bytes()


def folder_of(directory: Path, iteration: int) -> Path:
    """See Writer."""
    return native.checkpoint_folder(directory, iteration)


def export(shards: OpenSnapshot, folder: Path) -> None:
    """See Writer."""
    with whole_folder(folder, shards) as partial:
        for shard_id, shard in shards.items():
            (partial / f"{shard_id}.bin").write_bytes(shard.data.tobytes())


def announce(directory: Path, iteration: int) -> None:
    """See Writer."""
    native.point_tracker(directory, iteration)


def advice(directory: Path) -> str:
    """See Writer."""
    return f"the shards are in {directory}"


if __name__ == "__main__":
    add_format(FRAMEWORK, "chaos", MODULE)
    sys.exit(run_step({"export": export_drained.export}, f"python -m {MODULE}"))
