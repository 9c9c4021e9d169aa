"""Exports drained checkpoints: ``python -m megatron_ft.checkpoint.export_drained export PLAN``.

The supervisor starts this short-lived process on one node after a drain, when it was asked to.
Its exports are listed in their folder, because only they may be removed: the folder may hold
checkpoints of the framework's own as well.  An export of what the job was rolled back from is
withdrawn, because training will come to its iteration once more.

Only one running job exports to a folder.  A folder names one newest checkpoint, which is that of
the job that has come further.  Of two jobs that export to one folder, one would start from the
state of the other.  The supervisor and each process that writes an export share a lock, because a
writer may outlive its supervisor.  A supervisor that begins needs the lock alone for a moment.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from megatron_ft.checkpoint.disk_format import FILE_MODE, DiskCalls
from megatron_ft.checkpoint.drain import DrainPlan, run_step
from megatron_ft.checkpoint.export import FormatWriter, format_of, partial_of, writer_of
from megatron_ft.checkpoint.load import open_checkpoint
from megatron_ft.checkpoint.native import iteration_of, retract
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.core.errors import UNREADABLE, ConfigError, ExportError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, SnapshotId, on_lineage

log = logging.getLogger(__name__)

LEDGER = ".megatron-ft-exports.json"
"""File in a folder of exports: by job, those made after its drains, oldest first."""


class Exported(msgspec.Struct, frozen=True):
    """The name of one export and what it was made of; None in ledgers of older releases."""

    name: str
    snapshot: SnapshotId | None = None


Ledger = dict[uuid.UUID, list[Exported]]


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
        if one.snapshot is not None
        and lineage
        and one.snapshot.incarnation <= lineage[-1].incarnation
        and not on_lineage(one.snapshot, lineage)
        and iteration_of(Path(one.name)) >= iteration
    ]


def superfluous(names: list[str], keep: int) -> list[str]:
    """Names beyond the last ``keep``, in their order.  Pure."""
    return names[: max(0, len(names) - keep)]


def export(plan: DrainPlan) -> None:
    """Export the drained checkpoint of the plan, then remove older exports of the job.

    A folder that is there already is left as it is; ExportError if another job exported it, or
    exports to the plan's folder now.
    """
    directory = plan.export_dir
    assert directory is not None
    DiskCalls().make_folder(directory)
    with hold_to_write(directory, plan.job):
        _export(plan, directory)


def _export(plan: DrainPlan, directory: Path) -> None:
    with open_newest(open_checkpoint(plan.folder)) as shards:
        writer = writer_of(format_of(shards))
        withdraw(plan, directory, writer)
        folder = writer.folder_of(directory, plan.iteration)
        if folder.exists():
            log.info("%s is there already", folder)
            if is_ours(folder, plan.job):
                # One that appeared is whole, but this may have been cut off before the next line.
                writer.announce(directory, plan.iteration)
            return
        # First, so that one that is cut off is known to be ours.
        _note(directory, plan.job, Exported(folder.name, plan.snapshot))
        reach("export.noted")
        writer.export(shards, folder)
        reach("export.renamed")
        writer.announce(directory, plan.iteration)
        reach("export.announced")
    log.info("exported iteration %d to %s", plan.iteration, folder)
    tidy(directory, plan.job, plan.keep)


def is_ours(folder: Path, job: uuid.UUID) -> bool:
    """True if this job exported what is there; ExportError if another one did.

    The framework itself saved what no job exported.
    """
    makers = [job for job, known in _read(folder.parent).items() if folder.name in _names(known)]
    if makers and job not in makers:
        raise ExportError(
            f"{folder} is there already, exported by another job ({makers[0]}): remove what that "
            "job exported, or give this one a --drain-export-dir of its own"
        )
    return job in makers


def withdraw(plan: DrainPlan, directory: Path, writer: FormatWriter) -> None:
    """Remove exports of what the job has given up, and announce the newest that is left."""
    ledger = _read(directory)
    known = ledger.get(plan.job, [])
    gone = given_up(known, plan.iteration, plan.lineage)
    if not gone:
        return
    for one in gone:
        log.info("%s is of what the job was rolled back from", directory / one.name)
        retract(directory, directory / one.name)
        _remove(directory / one.name, plan.job)
    ledger[plan.job] = [one for one in known if one not in gone]
    _write(directory, ledger)
    left = [one.name for one in ledger[plan.job] if (directory / one.name).is_dir()]
    if left:
        writer.announce(directory, iteration_of(directory / left[-1]))


def _note(directory: Path, job: uuid.UUID, made: Exported) -> None:
    ledger = _read(directory)
    ledger[job] = [known for known in ledger.get(job, []) if known.name != made.name] + [made]
    _write(directory, ledger)


def tidy(directory: Path, job: uuid.UUID, keep: int) -> None:
    """Remove a job's exports beyond the newest ``keep``, and parts of those that were killed."""
    ledger = _read(directory)
    known = ledger.get(job, [])
    whole = [one for one in known if (directory / one.name).is_dir()]
    # An export that was killed may have left a part, which is of no use.
    unfinished = [one.name for one in known if one not in whole]
    for name in unfinished + superfluous(_names(whole), keep):
        _remove(directory / name, job)
    ledger[job] = whole[-keep:]
    _write(directory, ledger)


def _remove(folder: Path, job: uuid.UUID) -> None:
    for one in (folder, partial_of(folder, job)):
        if one.is_dir():
            shutil.rmtree(one)
            log.info("removed %s", one)


def _names(known: Sequence[Exported]) -> list[str]:
    return [one.name for one in known]


def _read(directory: Path) -> Ledger:
    path = directory / LEDGER
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[uuid.UUID, list[str | Exported]])
    except UNREADABLE as error:
        raise ExportError(
            f"{path} is damaged ({error}): remove it, and the exports that shall not stay"
        ) from error
    ledger = {
        job: [Exported(one) if isinstance(one, str) else one for one in known]
        for job, known in found.items()
    }
    # Others may write there, and what it names is removed with all that is in it.
    outside = [n for known in ledger.values() for n in _names(known) if not _is_name(n)]
    if outside:
        raise ExportError(f"{path} names {outside[0]!r}, which is no export in {directory}")
    return ledger


def _is_name(name: str) -> bool:
    return Path(name).name == name and name not in ("", "..")


def _write(directory: Path, ledger: Ledger) -> None:
    DiskCalls().write_file(directory / LEDGER, [msgspec.json.encode(ledger)])


LOCK = ".megatron-ft-exports.lock"
"""File in a folder of exports: names the job that exports there, which locks it."""
_MOST_BYTES = 4096
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Holder(msgspec.Struct, frozen=True):
    """A job, by the user's name for it and its uuid, and where its supervisor runs."""

    name: str
    job: uuid.UUID
    host: str
    pid: int


@contextmanager
def hold(folder: Path, holder: Holder) -> Iterator[str]:
    """Have no other job export to ``folder`` while the block runs.

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


@contextmanager
def hold_to_write(folder: Path, job: uuid.UUID) -> Iterator[None]:
    """Have no other job begin to export to ``folder`` while the block runs.

    ExportError if one has begun.  Where no supervisor could lock there is nothing to share.
    """
    with ExitStack() as held:
        try:
            lock = os.open(folder / LOCK, _OPEN)
            held.callback(os.close, lock)
            _share(lock, folder, job)
        except OSError:
            pass  # The job has reported it at its start.
        yield


def held_by_other(folder: Path, job: uuid.UUID | None) -> str:
    """The job that exports to ``folder`` now, in words; "" if none, ``job`` itself, or unknown."""
    with ExitStack() as held:
        try:
            lock = os.open(folder / LOCK, _OPEN)
            held.callback(os.close, lock)
            # For a moment a job that begins could take this process for another job.
            if _try(lock, fcntl.LOCK_EX):
                return ""
            other = _signature(lock)
        except OSError:
            return ""
    return "" if other is not None and other.job == job else _known(other)


def _take(lock: int, folder: Path, holder: Holder) -> None:
    alone = _try(lock, fcntl.LOCK_EX)
    if alone:
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(holder), 0)
        # A network file system may show it to others when it is closed, and not before.
        os.fsync(lock)
    # Between the two kinds of lock another job may get it.
    shared, other = _try(lock, fcntl.LOCK_SH), _signature(lock)
    # Of one job no two supervisors run: its notes have a lock of their own.
    ours = other is not None and other.job == holder.job
    if not (shared if alone else ours):
        raise ConfigError(_refusal(folder, holder, other))


def _share(lock: int, folder: Path, job: uuid.UUID) -> None:
    shared, other = _try(lock, fcntl.LOCK_SH), _signature(lock)
    ours = shared if other is None else other.job == job
    # A job that has ended leaves its name.
    if not (ours or _try(lock, fcntl.LOCK_EX)):
        raise ExportError(f"nothing is exported to {folder}: {_known(other)} exports there")


def _try(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _signature(lock: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(lock, _MOST_BYTES, 0), type=Holder)
    except UNREADABLE:
        return None


def _known(other: Holder | None) -> str:
    return f"job {other.name!r} (process {other.pid} on {other.host})" if other else "another job"


def _refusal(folder: Path, holder: Holder, other: Holder | None) -> str:
    return (
        f"job {holder.name!r} cannot export to {folder}: {_known(other)} exports there, and what "
        "loads from there takes the higher iteration, of whichever job. Give one of them another "
        f"folder, or wait until the other has ended; if that was lost with its machine, remove "
        f"{folder / LOCK}"
    )


if __name__ == "__main__":
    sys.exit(run_step({"export": export}, "python -m megatron_ft.checkpoint.export_drained"))
