"""Resources of a process: memory, descriptors, threads (proc(5))."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROLES = ("supervisor", "smp", "encoder", "trainer")
RESTARTED_ROLES = ("supervisor", "smp", "host", "trainer")
"""Processes that a soak of restarts judges; encoders end too soon for that."""


@dataclass(frozen=True)
class Sample:
    """One process at one moment, ``snapshots`` having been taken by then.

    Bytes: ``anonymous`` is resident memory of no file, shared with whom it was forked from or
    not; ``shared`` resident memory of tmpfs files, that is of arenas; ``proportional`` all
    resident memory, each page divided by the processes that have it (PSS).
    """

    role: str
    pid: int
    snapshots: int
    anonymous: int
    shared: int
    proportional: int
    descriptors: int
    threads: int


def sample(role: str, pid: int, snapshots: int) -> Sample | None:
    """A process now; None if it has gone."""
    folder = Path(f"/proc/{pid}")
    try:
        status = _fields((folder / "status").read_text())
        rollup = _fields((folder / "smaps_rollup").read_text())
        descriptors = len(os.listdir(folder / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "RssAnon" not in status or "Pss" not in rollup:
        return None  # a zombie
    return Sample(
        role,
        pid,
        snapshots,
        anonymous=_kibibytes(status["RssAnon"]),
        shared=_kibibytes(status["RssShmem"]),
        proportional=_kibibytes(rollup["Pss"]),
        descriptors=descriptors,
        threads=int(status["Threads"]),
    )


def sample_all(processes: Iterable[tuple[str, int]], snapshots: int) -> list[Sample]:
    """Those of (role, pid) that still run."""
    found = (sample(role, pid, snapshots) for role, pid in processes)
    return [one for one in found if one is not None]


def _fields(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


def _kibibytes(field: str) -> int:
    return 1024 * int(field.split()[0])
