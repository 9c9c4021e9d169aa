"""Exports drained checkpoints: ``python -m megatron_ft.checkpoint.export_drained export PLAN``.

The supervisor starts this short-lived process on one node after a drain, when it was asked to.
The folder of its exports may hold checkpoints of the framework's own as well.  Only what has this
job's mark (checkpoint.export) is removed.  An export of what the job was rolled back from is
withdrawn, because training will come to its iteration once more.

Only one running job exports to a folder.  A folder names one newest checkpoint, which is that of
the job that has come further.  Of two jobs that export to one folder, one would start from the
state of the other.  The supervisor and each process that writes an export share a lock, because a
writer may outlive its supervisor.  A job that begins needs the lock alone for a moment.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_ft.checkpoint.disk_format import FILE_MODE, DiskCalls
from megatron_ft.checkpoint.drain import DrainPlan, run_step
from megatron_ft.checkpoint.drained import open_checkpoint
from megatron_ft.checkpoint.export import (
    ExportMark,
    FormatWriter,
    format_of,
    partial_of,
    writer_of,
)
from megatron_ft.checkpoint.native import iteration_of, retract
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.core.errors import UNREADABLE, ConfigError, ExportError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, SnapshotId, on_lineage
from megatron_ft.core.private_files import try_lock

log = logging.getLogger(__name__)

STALE_SECONDS = 3600.0
"""Part of an export in which nothing was written for so long is of a process that was killed."""


class Exported(NamedTuple):
    """One export, and the snapshot that it was made of."""

    snapshot: SnapshotId
    folder: Path


def exports_in(directory: Path, job: uuid.UUID) -> list[Exported]:
    """The job's exports, oldest first; hidden folders, as unfinished ones are, do not count."""
    folders = (one for one in directory.glob("[!.]*") if not one.is_symlink())
    marks = ((ExportMark.of(folder), folder) for folder in folders)
    return sorted(Exported(mark.snapshot, one) for mark, one in marks if mark and mark.job == job)


def given_up(
    known: Sequence[Exported], iteration: int, lineage: Sequence[Ancestor]
) -> list[Exported]:
    """Exports that a rollback gave up: those from the job's present ``iteration`` on.  Pure.

    Those of earlier iterations stay even off the lineage: the job may have started from one of
    them, as from a checkpoint of the framework's own.  What is of a later incarnation is not known
    here.
    """
    return [
        one
        for one in known
        if lineage
        and one.snapshot.incarnation <= lineage[-1].incarnation
        and not on_lineage(one.snapshot, lineage)
        and iteration_of(one.folder) >= iteration
    ]


def export(plan: DrainPlan) -> None:
    """Export the drained checkpoint of the plan, then remove older exports of the job.

    A folder that is there already is left as it is; ExportError if another job exported it,
    ConfigError if another job exports to the plan's folder now.
    """
    directory = plan.export_dir
    assert directory is not None
    DiskCalls().make_folder(directory)
    writer = Holder(str(plan.job), plan.job, socket.gethostname(), os.getpid())
    # Where locks cannot be had, the job has reported it at its start.
    with hold(directory, writer), open_newest(open_checkpoint(plan.folder)) as shards:
        framework = writer_of(format_of(shards))
        withdraw(plan, directory, framework)
        folder = framework.folder_of(directory, plan.iteration)
        if folder.exists():
            log.info("%s is there already", folder)
            if is_ours(folder, plan.job):
                # One that appeared is whole, but this may have been cut off before the next line.
                framework.announce(directory, plan.iteration)
            return
        framework.export(shards, folder)
        reach("export.renamed")
        framework.announce(directory, plan.iteration)
        reach("export.announced")
    log.info("exported iteration %d to %s", plan.iteration, folder)
    tidy(directory, plan.job, plan.keep)


def is_ours(folder: Path, job: uuid.UUID) -> bool:
    """True if this job exported what is there; ExportError if another one did.

    The framework itself saved what has no mark.
    """
    mark = ExportMark.of(folder)
    if mark is not None and mark.job != job:
        raise ExportError(
            f"{folder} is there already, exported by another job ({mark.job}): remove what that "
            "job exported, or give this one a --drain-export-dir of its own"
        )
    return mark is not None


def withdraw(plan: DrainPlan, directory: Path, writer: FormatWriter) -> None:
    """Remove exports of what the job has given up, and announce the newest that is left."""
    known = exports_in(directory, plan.job)
    gone = given_up(known, plan.iteration, plan.lineage)
    for one in gone:
        log.info("%s is of what the job was rolled back from", one.folder)
        retract(directory, one.folder)
        _remove(one.folder, plan.job)
    left = [one for one in known if one not in gone]
    if gone and left:
        writer.announce(directory, iteration_of(left[-1].folder))


def tidy(directory: Path, job: uuid.UUID, keep: int) -> None:
    """Remove a job's exports beyond the newest ``keep``, and parts of those that were killed."""
    for one in exports_in(directory, job)[:-keep]:
        _remove(one.folder, job)
    for part in directory.glob(partial_of(directory / "*", job).name):
        # A younger one may be what `megatron-ft export` writes now.
        with suppress(FileNotFoundError):
            written = max(one.stat().st_mtime for one in (part, *part.rglob("*")))
            if time.time() - written > STALE_SECONDS:
                shutil.rmtree(part)


def _remove(folder: Path, job: uuid.UUID) -> None:
    # Under another name first: half a checkpoint would look like one of the framework's own.
    part = partial_of(folder, job)
    shutil.rmtree(part, ignore_errors=True)
    folder.rename(part)
    shutil.rmtree(part)
    log.info("removed %s", folder)


LOCK = ".megatron-ft-exports.lock"
"""File in a folder of exports: names the job that exports there, which locks it."""
_MOST_BYTES = 4096
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Holder(msgspec.Struct, frozen=True):
    """A job, by the user's name for it and its uuid, and a process of it."""

    name: str
    job: uuid.UUID
    host: str
    pid: int


@contextmanager
def hold(folder: Path, holder: Holder) -> Iterator[str]:
    """Have no other job export to ``folder`` while the block runs; processes of one job share.

    Gives why that cannot be had, or "": not every file system has locks.  ConfigError if another
    job holds it, or what that job has started still writes there.
    """
    with ExitStack() as held:
        try:
            lock = os.open(folder / LOCK, _OPEN | os.O_CREAT, FILE_MODE)
            held.callback(os.close, lock)
            _take(lock, folder, holder)
            problem = ""
        except OSError as error:
            problem = error.strerror or str(error)
        yield problem


def held_by_other(folder: Path, job: uuid.UUID | None) -> str:
    """The job that exports to ``folder`` now, in words; "" if none, ``job`` itself, or unknown."""
    with ExitStack() as held:
        try:
            lock = os.open(folder / LOCK, _OPEN)
            held.callback(os.close, lock)
            # For a moment a job that begins could take this process for another job.
            if try_lock(lock, fcntl.LOCK_EX):
                return ""
            other = _signature(lock)
        except OSError:
            return ""
    return "" if other is not None and other.job == job else _known(other)


def _take(lock: int, folder: Path, holder: Holder) -> None:
    alone = try_lock(lock, fcntl.LOCK_EX)
    if alone:
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(holder), 0)
        # A network file system may show it to others when it is closed, and not before.
        os.fsync(lock)
    # Between the two kinds of lock another job may get it.
    shared, other = try_lock(lock, fcntl.LOCK_SH), _signature(lock)
    # Who looks whether the folder is free has the lock alone for a moment, and signs nothing.
    ours = other is not None and other.job == holder.job
    if not (shared if alone else ours):
        raise ConfigError(
            f"job {holder.name!r} cannot export to {folder}: {_known(other)} exports there. Give "
            "one of them another folder, or wait until the other has ended; if that was lost with "
            f"its machine, remove {folder / LOCK}"
        )


def _signature(lock: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(lock, _MOST_BYTES, 0), type=Holder)
    except UNREADABLE:
        return None


def _known(other: Holder | None) -> str:
    return f"job {other.name!r} (process {other.pid} on {other.host})" if other else "another job"


if __name__ == "__main__":
    sys.exit(run_step({"export": export}, "python -m megatron_ft.checkpoint.export_drained"))
