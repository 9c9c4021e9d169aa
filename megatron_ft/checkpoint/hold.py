"""A folder of exports is one running job's.

A training framework finds its newest checkpoint by the one name that a folder has for it, which
is that of whichever job has come further: of two jobs that export to one folder, one would be
started from the state of the other.

The supervisor and each process that writes an export share a lock, so that it lasts as long as
the last of them: a writer may outlive its supervisor.  Who begins needs it alone for a moment.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from megatron_ft.checkpoint.durable import FILE_MODE
from megatron_ft.core.errors import UNREADABLE, ConfigError, ExportError

LOCK = ".megatron-ft-exports.lock"
"""In a folder of exports: locked by the job that exports there, and says who that is."""
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
            pass  # The job has said so at its start.
        yield


def held_by_other(folder: Path, job: uuid.UUID | None) -> str:
    """Who exports to ``folder`` now, in words; "" if nobody does, nobody knows, or ``job`` does."""
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
