"""The folder of a node: its lock, which one SMP holds, and the few facts stored next to arenas.

An SMP that starts ends an older one of the same job.  A supervisor that is killed just after it
has started an SMP has not recorded it, and the next supervisor starts another.  The newer SMP is
the one that the job wants: the state of a job is locked, so there is one supervisor.  An SMP may
be killed at any moment.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.errors import UNREADABLE, ControlPlaneError
from megatron_ft.smp.processes import open_started, start_time_of

LOCK_NAME = "smp.lock"
PID_NAME = "smp.pid"
STATE_NAME = "node.json"

SLURM_JOB = "slurm-job"
"""Holds the number of the Slurm job that a node's folder is of, for scripts/slurm/epilog.sh."""

GIVE_WAY_SECONDS = 10.0
"""Longest time for an older SMP of the same job to sign the lock file, and to end."""

_POLL_SECONDS = 0.05
_SIGNATURE_BYTES = 256

log = logging.getLogger(__name__)


class Owner(msgspec.Struct, frozen=True):
    """Content of the lock file: the SMP that holds the lock; ``job`` is the job's UUID."""

    job: str
    pid: int
    start_time: int


def remove_node_dir(node_dir: Path) -> None:
    """Remove a node's folder, and that of the job once no node has one there."""
    shutil.rmtree(node_dir, ignore_errors=True)
    job = node_dir.parent
    with suppress(OSError):
        if all(path.name.startswith(".") for path in job.iterdir()):
            shutil.rmtree(job, ignore_errors=True)


def lock_folder(directory: Path, job: str, *, send_away: bool = True) -> BinaryIO:
    """Hold the folder's lock for as long as this process lives.

    ControlPlaneError if it is held by an SMP of another job, by one that this process cannot see
    (another container's), or by one that does not go; without ``send_away`` by any SMP.
    """
    deadline = time.monotonic() + GIVE_WAY_SECONDS
    while True:
        lock = os.fdopen(
            private_files.open_file(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT), "r+b", 0
        )
        if not private_files.try_lock(lock.fileno()):
            if not send_away:
                lock.close()
                raise ControlPlaneError(f"a newer SMP owns {directory}: this one ends")
            _send_away(directory, lock, job, deadline)
            lock.close()
        elif private_files.is_at(lock.fileno(), directory / LOCK_NAME):
            signature = msgspec.json.encode(Owner(job, os.getpid(), start_time_of(os.getpid())))
            # In place, so that a full tmpfs keeps nobody from taking the lock over.
            lock.seek(0)
            lock.write(signature.ljust(_SIGNATURE_BYTES, b"\n"))
            return lock
        else:
            # `megatron-ft clean` has removed the file between our open and our lock.
            lock.close()
            private_files.make_folder(directory)


def _send_away(directory: Path, lock: BinaryIO, job: str, deadline: float) -> None:
    """End the SMP that holds the lock, if it is of the same job; wait a moment otherwise.

    The file's content may be of the SMP before, or not there yet: the lock comes first.
    """
    owner = _signature(lock)
    if (owner is not None and owner.job != job) or time.monotonic() > deadline:
        raise ControlPlaneError(
            f"another SMP already owns {directory}: a job of this name is running, or was "
            "stopped and keeps its snapshots. Run its command again with the same --state-dir "
            "to continue, free it with `megatron-ft clean`, or choose another --job name"
        )
    if owner is None or not _ended(owner):
        time.sleep(_POLL_SECONDS)


def _signature(lock: BinaryIO) -> Owner | None:
    lock.seek(0)
    try:
        return msgspec.json.decode(lock.read(), type=Owner)
    except UNREADABLE:
        return None


def _ended(owner: Owner) -> bool:
    """Kill this SMP; True if it was there and is gone."""
    try:
        pidfd = open_started(owner.pid, owner.start_time)
    except ProcessLookupError:
        return False
    try:
        log.warning("SMP %d of this job, of which no supervisor knows, is ended", owner.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(select.select([pidfd], [], [], GIVE_WAY_SECONDS)[0])
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)


class NodeFolder:
    """A node's folder and its lock, which this process holds for as long as it lives."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory, self._job = directory, job
        self._lock: BinaryIO | None = None

    def acquire(self, *, send_away: bool = True) -> None:
        """Make the folder and hold its lock; errors as of ``lock_folder``."""
        directory = self.directory
        private_files.make_node_folder(directory)
        number = os.environ.get("SLURM_JOB_ID")
        if number is not None:
            private_files.rewrite_file(directory / SLURM_JOB, number.encode())
        self.close()
        self._lock = lock_folder(directory, self._job, send_away=send_away)

    def in_place(self) -> bool:
        lock, path = self._lock, self.directory / LOCK_NAME
        return lock is not None and private_files.is_at(lock.fileno(), path)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def write_pid(directory: Path) -> None:
    private_files.rewrite_file(directory / PID_NAME, str(os.getpid()).encode())


class NodeState(msgspec.Struct, frozen=True):
    """The highest incarnation ever admitted here, and whether snapshots are paused."""

    highest_incarnation: int = 0
    paused: bool = False

    @classmethod
    def load(cls, directory: Path) -> NodeState:
        """The stored state, or the initial one.

        ControlPlaneError if it is damaged: without it the fence against older incarnations is gone.
        """
        path = directory / STATE_NAME
        try:
            return msgspec.json.decode(private_files.read_file(path), type=cls)
        except FileNotFoundError:
            return cls()
        except UNREADABLE as error:
            raise ControlPlaneError(
                f"{path} is damaged ({error}): the incarnation that was here is unknown"
            ) from error

    def save(self, directory: Path) -> None:
        """Rewrite the file at once; it is on a tmpfs, so nothing is flushed."""
        private_files.rewrite_file(directory / STATE_NAME, msgspec.json.encode(self))
