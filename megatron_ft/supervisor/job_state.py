"""The supervisor's notes about its job, so that a later supervisor can take it over."""

from __future__ import annotations

import fcntl
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.checkpoint.decide import Quarantine
from megatron_ft.core import private_files
from megatron_ft.core.errors import (
    UNREADABLE,
    ConfigError,
    ControlPlaneError,
    StaleIncarnationError,
    UntrustedFileError,
)
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, RankRule, ShardPlacement

VERSION = 2
SECRET_BYTES = 32
STATUS = "status.json"
"""Name of the file that holds the job's status."""

_FILE, _TEMPORARY, _LOCK = "job.json", ".job.json.tmp", "lock"


class SmpPlace(msgspec.Struct, frozen=True):
    """Place of a node's SMP: its process, named by pid and start time, and its endpoint."""

    pid: int
    start_time: int
    endpoint: str


class DiskPlaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Folders on disk that the job's last start named; "" for none.

    ``drain_mount`` is where the file system was mounted that held ``drain_dir``.
    """

    drain_dir: str = ""
    drain_mount: str = ""
    checkpoint_dir: str = ""


class JobRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of one job's state file.

    ``name`` is the user's name for the job, ``job`` its uuid.  ``active`` are the nodes
    that trainers run on, in the order of their ranks.  ``shards`` gives the seat of each
    shard, ``incarnation`` the job's last incarnation, ``lineage`` what that one descends from,
    ``committed`` whether it ever committed a snapshot, ``quarantine`` which ones must not be
    used, ``rank_rule`` with how many ranks the command could continue, ``disk`` where checkpoints
    are, ``evacuated`` the nodes that must not train, ``avoided`` those of them that may before the
    job stops for lack of a spare.  ``sources`` gives the node of each shard of
    an older layout that the present one was, or is to be, reshaped from, ``source_seats`` their
    seats in that layout, ``nodes`` the number of nodes that was asked for.  The secret never
    appears in text made from this object.
    """

    version: int
    name: str
    job: uuid.UUID
    uid: int
    secret: bytes
    smps: dict[str, SmpPlace] = {}
    active: tuple[str, ...] = ()
    scheme: str = ""
    shards: dict[str, ShardPlacement] = {}
    incarnation: int = 0
    lineage: tuple[Ancestor, ...] = ()
    committed: bool = False
    quarantine: Quarantine = Quarantine()
    rank_rule: RankRule | None = None
    disk: DiskPlaces = DiskPlaces()
    evacuated: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    sources: dict[str, str] = {}
    source_seats: dict[str, ShardPlacement] = {}
    nodes: int = 0

    def __repr__(self) -> str:
        return f"JobRecord(name={self.name!r}, job={self.job}, smps={self.smps})"

    def __rich_repr__(self) -> Any:
        yield "name", self.name


def homes_of(seats: Mapping[str, ShardPlacement], nodes: Sequence[str]) -> dict[str, str]:
    """The node of each shard: ranks in order, as many on each of the nodes as on any other."""
    return {shard: nodes[seat.rank * len(nodes) // len(seats)] for shard, seat in seats.items()}


class JobHeldError(ControlPlaneError):
    """Another supervisor leads the job just now, on this machine."""


class JobState:
    """The state folder of one job, held by one supervisor at a time.

    The folder has mode 0700, its file 0600.  A lock is held until ``close`` or the end of
    the process, however it ends.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Take the lock, then read or create the file.

        Raises JobHeldError when another supervisor holds the job, ControlPlaneError when the
        file is unreadable or of another job, user or release.
        """
        self.folder = folder
        make_notes_folder(folder)
        self._lock: int | None = _take_lock(folder, name)
        try:
            self._record = read_record(folder, name) or self._create(name)
            reach("restart.state_read")
        except OSError as error:
            self.close()
            raise ControlPlaneError(
                f"{folder / _FILE} cannot be written ({error.strerror}): make room there, or give "
                "another --state-dir"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def record(self) -> JobRecord:
        return self._record

    def update(self, **changes: Any) -> JobRecord:
        """Write a record with these fields changed; on return it is on stable storage.

        ControlPlaneError if the disk does not take it: the record is what it was.
        """
        assert self._lock is not None, "the state was closed"
        record = msgspec.structs.replace(self._record, **changes)
        try:
            self._require_folder()
            write_record(self.folder, record)
        except OSError as error:
            raise ControlPlaneError(
                f"the notes of job {record.name!r} cannot be written to {self.folder} "
                f"({error.strerror}): make room there, or mend it"
            ) from error
        self._record = record
        return record

    def keep(self, **changes: Any) -> None:
        """Change these fields in memory; the next ``update`` writes them."""
        self._record = msgspec.structs.replace(self._record, **changes)

    def _require_folder(self) -> None:
        """Have the folder and our lock in it; notes of another job there stay as they are."""
        assert self._lock is not None, "the state was closed"
        if private_files.is_at(self._lock, self.folder / _LOCK):
            return
        make_notes_folder(self.folder)
        lock = _take_lock(self.folder, self._record.name)
        try:
            found = read_record(self.folder, self._record.name)
            if found is not None and found.job != self._record.job:
                raise StaleIncarnationError(
                    f"the notes in {self.folder} were removed, and belong to another job "
                    f"{found.name!r} now; this one stops"
                )
        except BaseException:
            os.close(lock)
            raise
        os.close(self._lock)
        self._lock = lock

    def remove(self) -> None:
        """Forget the job: remove our files, the folder if then empty, and give back the lock."""
        for name in (_FILE, _TEMPORARY, STATUS, f".{STATUS}.tmp", _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        # Not a removal of all that is in it: somebody may have put something there.
        with suppress(OSError):
            self.folder.rmdir()
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> JobState:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _create(self, name: str) -> JobRecord:
        record = JobRecord(
            VERSION, name, uuid.uuid4(), os.geteuid(), secrets.token_bytes(SECRET_BYTES)
        )
        write_record(self.folder, record)
        return record


def state_folder(name: str, state_dir: Path | None = None) -> Path:
    """Folder of a job's state: <state_dir>/<name>, by default in ~/.cache/megatron-ft."""
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"{name!r} cannot name a job: no slash, no dot in front, not empty")
    try:
        return (state_dir or Path.home() / ".cache" / "megatron-ft") / name
    except RuntimeError as error:
        raise ConfigError(
            f"user {os.geteuid()} has no home folder for the job's notes: give --state-dir"
        ) from error


def known_shards(name: str, state_dir: Path | None = None) -> dict[str, ShardPlacement]:
    """Shards that the job is known to have, from its supervisor's notes; {} without notes."""
    record = read_record(state_folder(name, state_dir), name)
    return {} if record is None else record.shards


def noted_jobs(state_dir: Path | None = None) -> set[str]:
    """Names of the jobs that have notes there: they run, or are kept for the same command."""
    return {path.parent.name for path in state_folder("any", state_dir).parent.glob(f"*/{_FILE}")}


def read_record(folder: Path, name: str) -> JobRecord | None:
    """The record in a state folder without taking the lock; None if there is none.

    Raises ControlPlaneError when it is unreadable or of another job, user or release.
    """
    path = folder / _FILE
    try:
        raw = private_files.read_file(path)
    except FileNotFoundError:
        return None
    except UntrustedFileError as error:
        raise ControlPlaneError(str(error)) from error
    except OSError as error:
        raise _refusal(path, name, f"cannot be read ({error.strerror})") from error
    try:
        record = msgspec.json.decode(raw, type=JobRecord)
    except UNREADABLE as error:
        raise _refusal(path, name, f"is damaged or of another release ({error})") from error
    expected = (VERSION, name, os.geteuid(), SECRET_BYTES)
    if (record.version, record.name, record.uid, len(record.secret)) != expected:
        reason = "is of another job, user or release, or holds no secret"
        raise _refusal(path, name, reason)
    return record


def write_record(folder: Path, record: JobRecord) -> None:
    """Replace the record whole: a reader sees the old one or the new one."""
    content = msgspec.json.format(msgspec.json.encode(record))
    reach("recovery.noted")
    private_files.replace_file(folder / _FILE, content, durable=True)


def _refusal(path: Path, name: str, reason: str) -> ControlPlaneError:
    return ControlPlaneError(
        f"{path} {reason}; `megatron-ft clean` removes what is left of a job, or choose another "
        f"name than {name!r} or another --state-dir"
    )


def make_notes_folder(folder: Path, *, close: bool = True) -> None:
    """Have a folder of a job's notes; with ``close`` one that was open to others is closed.

    ControlPlaneError if it is somebody else's, or cannot be made.
    """
    try:
        private_files.make_folder(folder, close=close)
    except UntrustedFileError as error:
        raise ControlPlaneError(f"{error}; or choose another --state-dir") from error
    except OSError as error:
        raise ControlPlaneError(
            f"{folder} cannot be made ({error.strerror}): give a --state-dir that this user may "
            "write to and all nodes see"
        ) from error


def _take_lock(folder: Path, name: str) -> int:
    """The descriptor of the folder's lock, which names this process; JobHeldError if it is held."""
    lock = -1
    try:
        lock = private_files.open_file(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not private_files.is_at(lock, folder / _LOCK):
            raise ControlPlaneError(f"job {name!r} was being removed just now; start again")
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        taken, lock = lock, -1
        return taken
    except UntrustedFileError as error:
        raise ControlPlaneError(str(error)) from error
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise JobHeldError(
            f"job {name!r} already has a supervisor, process {holder} here or elsewhere; wait for "
            "it, end it, or give this job another name"
        ) from error
    except OSError as error:
        raise ControlPlaneError(
            f"{folder / _LOCK} cannot be made and locked ({error.strerror}): give a --state-dir "
            "with room, that this user may write to, on a file system with locks"
        ) from error
    finally:
        if lock >= 0:
            os.close(lock)


def is_supervised(job: str, state_dir: Path | None) -> bool:
    """True if a supervisor holds the lock of the job's state in this folder."""
    try:
        lock = private_files.open_file(state_folder(job, state_dir) / _LOCK)
    except FileNotFoundError:
        return False
    try:
        return not private_files.try_lock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)
