"""A folder of exports is one running job's.

A training framework finds its newest checkpoint by the one name that a folder has for it, which
is that of whichever job has come further: of two jobs that export to one folder, one would be
started from the state of the other.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from megatron_ft.decoding import UNREADABLE
from megatron_ft.disk.durable import FILE_MODE
from megatron_ft.errors import ConfigError

LOCK = ".megatron-ft-exports.lock"
"""In a folder of exports: locked by the job that exports there, and says who that is."""
_MOST_BYTES = 4096


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
    job holds it.
    """
    with ExitStack() as held:
        try:
            lock = os.open(
                folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE
            )
            held.callback(os.close, lock)
            _take(lock, folder, holder)
            problem = ""
        except OSError as error:
            problem = error.strerror or str(error)
        yield problem


def _take(lock: int, folder: Path, holder: Holder) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = _signature(lock)
        # A file server may keep for long what a machine had locked that is lost.  Of one job no
        # two supervisors run: its notes have a lock of their own.
        if other is None or other.job != holder.job:
            raise ConfigError(_refusal(folder, holder, other)) from None
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, msgspec.json.encode(holder), 0)
    # A network file system may show it to others when it is closed, and not before.
    os.fsync(lock)


def _signature(lock: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(lock, _MOST_BYTES, 0), type=Holder)
    except UNREADABLE:
        return None


def _refusal(folder: Path, holder: Holder, other: Holder | None) -> str:
    known = f"job {other.name!r} (process {other.pid} on {other.host})" if other else "another job"
    return (
        f"job {holder.name!r} cannot export to {folder}: {known} exports there, and what loads "
        "from there takes the higher iteration, of whichever job. Give one of them another "
        f"folder, or wait until the other has ended; if that was lost with its machine, remove "
        f"{folder / LOCK}"
    )
