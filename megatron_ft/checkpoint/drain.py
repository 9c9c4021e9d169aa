"""Drains one snapshot to disk: ``python -m megatron_ft.checkpoint.drain STEP PLAN``.

The supervisor starts these short-lived processes on nodes: ``clear``, ``publish`` and
``tidy`` on one, ``write`` on every node that has shards.  PLAN is a DrainPlan as JSON.

Shard files are written by all nodes, the manifest last.  Until that is there, the folder is
nothing, and what else is in the drain folder is as it was.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import digest
from megatron_ft.checkpoint import disk_format
from megatron_ft.checkpoint.disk_format import (
    MANIFEST,
    MANIFEST_VERSION,
    SHARD_SUFFIX,
    DiskCalls,
    Manifest,
    ShardFile,
    folder_name,
    is_complete,
)
from megatron_ft.checkpoint.drained import clean_up, clear_unfinished
from megatron_ft.checkpoint.live import hold, scan
from megatron_ft.checkpoint.load import ProcessPlan, check_folder, open_trusted
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes, SnapshotInfo
from megatron_ft.core.background import Pace, lower_priority
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import (
    CheckpointDamagedError,
    DrainError,
    MegatronFTError,
    SnapshotUnavailableError,
)
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId
from megatron_ft.rpc.local_query import pinned, register_leased_process

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20


def write_shards(
    shards: OpenSnapshot,
    folder: Path,
    disk: DiskCalls | None = None,
    pace: Pace | None = None,
    seats: Mapping[str, ShardPlacement] | None = None,
) -> int:
    """Write these shards into a checkpoint's folder; bytes written.

    Every byte is checked once more after it was copied out of the arena.  ``seats`` say
    where shards belong, as far as that is known.  OSError from the disk,
    SnapshotUnavailableError if the memory was reused meanwhile, CheckpointDamagedError if the
    folder is somebody else's.
    """
    disk, pace = disk or DiskCalls(), pace or Pace(0)
    disk.make_folder(folder)
    # Its name can be guessed by who has seen another; in one of theirs nobody would trust it.
    check_folder(folder)
    written = 0
    for shard_id, shard in shards.items():
        path = folder / f"{shard_id}{SHARD_SUFFIX}"
        seat = (seats or {}).get(shard_id)
        disk.write_file(path, _pieces(shard, shards.job, pace, seat))
        shards.check()
        written += path.stat().st_size
        reach("drain.shard_written")
    return written


def _pieces(
    shard: ShardBytes, job: uuid.UUID, pace: Pace, seat: ShardPlacement | None
) -> Iterator[object]:
    known = (shard.record, shard.block_bytes, str(job))
    header = disk_format.ShardHeader(*known, seat)
    yield disk_format.pack_header(header, shard.layout)
    table = digest.digest_table(shard.data, shard.record)
    if digest.digest_root(table, shard.record) != shard.record.digest_root:
        raise SnapshotUnavailableError(
            f"the digest table in {shard.origin} changed under the drain"
        )
    blocks = max(1, PIECE_BYTES // shard.block_bytes)
    for first in range(0, table.size, blocks):
        piece = _checked_copy(shard, first, table[first : first + blocks])
        yield piece.data
        reach("drain.writing")
        pace.after(piece.size)
    yield np.ascontiguousarray(table, dtype="<u8").data


def _checked_copy(shard: ShardBytes, first: int, expected: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Blocks ``first`` and following, of which the copy has the digests that it should."""
    start = first * shard.block_bytes
    stop = min(start + expected.size * shard.block_bytes, shard.record.digest_offset)
    copy, found = np.empty(stop - start, np.uint8), np.empty_like(expected)
    digest.copy_blocks(shard.data[start:stop], copy, shard.block_bytes, found)
    if bad := [first + int(number) for number in np.flatnonzero(found != expected)]:
        raise SnapshotUnavailableError(
            f"shard {shard.record.shard_id} in {shard.origin} changed while it was drained: "
            f"blocks {digest.name_blocks(bad)} no longer match their digests"
        )
    return copy


def publish(
    folder: Path,
    info: SnapshotInfo,
    job: uuid.UUID,
    lineage: tuple[Ancestor, ...],
    shard_count: int,
    disk: DiskCalls | None = None,
) -> Manifest:
    """Make a folder of ``shard_count`` shard files a checkpoint.

    DrainError if files are missing, or are not of this snapshot.
    """
    files = dict(
        _shard_file(path, info, job) for path in sorted(folder.glob(f"[!.]*{SHARD_SUFFIX}"))
    )
    if len(files) != shard_count:
        raise DrainError(
            f"{folder} has {len(files)} shards of {shard_count}: some node wrote to another disk "
            "(the drain folder must be on a file system that all nodes share), or not at all"
        )
    manifest = Manifest(
        format_version=MANIFEST_VERSION,
        job=job,
        snapshot=info.snapshot,
        iteration=info.iteration,
        level=info.level,
        lineage=lineage,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        shards=files,
    )
    disk = disk or DiskCalls()
    # The process that made the folder may have been killed before its name was durable.
    disk.sync_folder(folder.parent)
    disk.write_file(folder / MANIFEST, _reaching(manifest.to_json()))
    return manifest


def _reaching(text: bytes) -> Iterator[bytes]:
    yield text
    reach("drain.manifest")


def _shard_file(path: Path, info: SnapshotInfo, job: uuid.UUID) -> tuple[str, ShardFile]:
    """A shard's line of the manifest, from what its file says of itself."""
    try:
        with open(open_trusted(path, DiskCalls()), "rb") as file:
            start = file.read(disk_format.LENGTH_BYTES)
            rest = disk_format.header_length(start, str(path)) - disk_format.LENGTH_BYTES
            raw = start + file.read(rest)
        header = disk_format.unpack_header(raw, str(path))
    except CheckpointDamagedError as error:
        raise DrainError(f"a shard was not written as it should be: {error}") from error
    record = header.record
    if (record.snapshot, header.job) != (info.snapshot, str(job)):
        raise DrainError(f"{path} is of snapshot {record.snapshot} of job {header.job}; remove it")
    size = path.stat().st_size
    if size != len(raw) + record.used_bytes:
        raise DrainError(f"{path} has {size} bytes instead of {len(raw) + record.used_bytes}")
    digests = (disk_format.header_digest(raw), record.digest_root.hex())
    line = ShardFile(path.name, size, *digests, header.seat)
    return record.shard_id, line


class DrainPlan(ProcessPlan, frozen=True):
    """Order to drain one snapshot: its shards, their nodes, and the folder.

    ``shards`` are those of the node that the plan is for with their seats, ``shard_count`` is
    of the whole job.  ``keep`` says what stays in ``directory``, on the file system that was
    mounted at ``mount`` when the job started (None: not looked at); ``bandwidth_mib`` is MiB/s
    a node, 0 for no cap.  ``export_dir`` gets a checkpoint of the training framework's own, made
    of what was drained; None for none.
    """

    job: uuid.UUID
    snapshot: SnapshotId
    iteration: int
    level: str
    lineage: tuple[Ancestor, ...]
    directory: Path
    shard_count: int
    shards: dict[str, ShardPlacement] = {}
    keep: int = 2
    bandwidth_mib: float = 0.0
    export_dir: Path | None = None
    mount: Path | None = None

    @property
    def folder(self) -> Path:
        return self.directory / folder_name(self.job, self.iteration, self.snapshot)

    @property
    def info(self) -> SnapshotInfo:
        return SnapshotInfo(self.snapshot, self.iteration, self.level)


def run_step(steps: Mapping[str, Callable[[DrainPlan], None]], program: str) -> int:
    """Do the step of ``steps`` that the command line names, at low priority.

    Exit codes: 0 done, 1 failed, and the last line of output says why.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("step", choices=sorted(steps))
    parser.add_argument("plan", type=DrainPlan.from_json)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lower_priority()
    try:
        register_leased_process(options.step)
        _check_mounted(options.plan)
        steps[options.step](options.plan)
    except (MegatronFTError, OSError) as error:
        log.error("%s", error)
        return 1
    return 0


def _check_mounted(plan: DrainPlan) -> None:
    """DrainError if nothing is mounted there: below the mount point is each node's own disk."""
    if plan.mount is not None and not os.path.ismount(plan.mount):
        raise DrainError(
            f"{plan.mount} is not mounted any more: {plan.directory} was on it; mount it again, or "
            "start the job with another --drain-dir"
        )


def clear(plan: DrainPlan) -> None:
    """Remove what earlier drains of the job did not finish; what cannot be stays."""
    if plan.directory.exists():
        try:
            clear_unfinished(plan.directory, plan.job)
        except OSError as error:
            log.warning("what an earlier drain has left stays: %s", error)


def write(plan: DrainPlan) -> None:
    """Write the shards of this node; a checkpoint that is complete is left as it is."""
    if is_complete(plan.folder):
        return
    node = ProcessEnvironment.from_env().node_dir
    pace = Pace(plan.bandwidth_mib * (1 << 20))
    with (
        pinned([node], plan.snapshot),
        scan([node]) as memory,
        hold(memory, plan.info, plan.shards) as shards,
    ):
        reach("drain.held")
        if shards.job != plan.job:
            raise DrainError(f"{node} holds arenas of job {shards.job}, not of {plan.job}")
        written = write_shards(shards, plan.folder, pace=pace, seats=plan.shards)
    log.info("wrote %d bytes of iteration %d to %s", written, plan.iteration, plan.folder)


def finish(plan: DrainPlan) -> None:
    """Write the manifest.  Nothing is removed: this process may outlive its supervisor, and the
    job may resume from an older checkpoint."""
    if not is_complete(plan.folder):
        publish(plan.folder, plan.info, plan.job, plan.lineage, plan.shard_count)
    reach("drain.published")


def tidy(plan: DrainPlan) -> None:
    """Remove what is superfluous now; to be begun by a supervisor that knows of the manifest."""
    try:
        for folder in clean_up(plan.directory, plan.job, plan.keep, plan.lineage):
            log.info("removed %s", folder)
    except OSError as error:
        raise DrainError(f"older checkpoints could not be removed: {error}") from error


STEPS: Mapping[str, Callable[[DrainPlan], None]] = {
    "clear": clear,
    "write": write,
    "publish": finish,
    "tidy": tidy,
}


if __name__ == "__main__":
    sys.exit(run_step(STEPS, "python -m megatron_ft.checkpoint.drain"))
