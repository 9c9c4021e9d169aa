"""Memory for arenas: whether there is enough, asked before allocation.

The answer after an allocation may be a kill: a tmpfs that is full says ENOSPC, but a memory cgroup
that is full calls the OOM killer.  Every limit that applies is therefore read first: free space of
the file system, the machine's available memory, and each memory cgroup from our own up to the root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ft.arena.format import BLOCK_BYTES, Geometry
from megatron_ft.core.errors import ArenaMemoryError
from megatron_ft.core.scheme import Scheme

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# cgroup v1 writes "no limit" as the largest page count in bytes.
_V1_UNLIMITED = 1 << 60


class MemoryReading(NamedTuple):
    """One limit as it was read: what it is, and how many more bytes it lets us use."""

    limit: str
    available_bytes: int


class _CgroupFiles(NamedTuple):
    limits: tuple[str, ...]
    usage: str
    # Page cache that the kernel drops before it kills; arenas are never part of these two.
    reclaimable: tuple[str, ...]
    # Has a line "oom_kill N": processes of this cgroup that the OOM killer has ended.
    events: str


_V2 = _CgroupFiles(
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    "memory.events",
)
_V1 = _CgroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.oom_control",
)


def node_bytes(shard_bytes: int, ranks_per_node: int, slot_count: int, actual: Scheme) -> int:
    """Bytes of a node's arenas, headers included, with stripes of the ``actual`` scheme."""
    geometry = Geometry.for_stripe(
        slot_count=slot_count,
        required_bytes=shard_bytes,
        data_members=actual.data_members,
        parity_members=actual.parity_members,
        block_bytes=BLOCK_BYTES,
    )
    return ranks_per_node * geometry.file_bytes


def describe_requirement(geometry: Geometry, parity_members: int, data_members: int) -> str:
    """The arithmetic behind one arena's size, in words for an error or a plan."""
    slots, state = geometry.slot_count, geometry.data_bytes
    total = slots * (state + parity_members * state // data_members)
    return (
        f"{format_bytes(state)} of state per shard x {slots} slots x "
        f"(1 + {parity_members}/{data_members}) = {format_bytes(total)}, "
        f"with headers {format_bytes(geometry.file_bytes)} per shard, "
        "times the shards of this node"
    )


def format_bytes(count: int) -> str:
    """Bytes for people, for example ``3.50 GiB``; small counts stay exact."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**exponent:
            return f"{count / 1024**exponent:.2f} {unit}"
    return f"{count} bytes"


def memory_shortfall(need_bytes: int, readings: Sequence[MemoryReading]) -> MemoryReading | None:
    """The tightest limit if it leaves less than ``need_bytes``, else None."""
    tightest = min(readings, key=lambda r: r.available_bytes, default=None)
    if tightest is None or tightest.available_bytes >= need_bytes:
        return None
    return tightest


def check_memory(
    directory: Path,
    need_bytes: int,
    arithmetic: str,
    *,
    cgroup_root: Path = CGROUP_ROOT,
    proc: Path = PROC,
) -> None:
    """ArenaMemoryError if some limit leaves less than ``need_bytes`` for files in ``directory``.

    ``arithmetic`` says where the need comes from and is part of the message.  The
    cgroup read is this process's: call it in the process that will touch the pages.
    """
    short = memory_shortfall(need_bytes, memory_readings(directory, cgroup_root, proc))
    if short is not None:
        raise ArenaMemoryError(shortage_message(directory, need_bytes, arithmetic, short))


def shortage_message(
    directory: Path, need_bytes: int, arithmetic: str, short: MemoryReading
) -> str:
    return (
        f"no memory for an arena in {directory}: it needs {format_bytes(need_bytes)} "
        f"({need_bytes} bytes: {arithmetic}), but {short.limit} leaves "
        f"{format_bytes(max(short.available_bytes, 0))}. Raise that limit (a tmpfs: "
        "`mount -o remount,size=...`; a container: its shared memory size and memory limit), use "
        "fewer slots or less parity, or choose another directory"
    )


def memory_readings(
    directory: Path, cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC
) -> list[MemoryReading]:
    """Every limit that applies to pages of ``directory`` touched by this process."""
    space = os.statvfs(directory)
    readings = [MemoryReading(f"free space of {directory}", space.f_bavail * space.f_frsize)]
    available = _meminfo_available(proc / "meminfo")
    if available is not None:
        readings.append(MemoryReading("available memory of the machine", available))
    membership = _text(proc / "self" / "cgroup") or ""
    for folder, files in cgroup_folders(cgroup_root, membership):
        readings.extend(_cgroup_readings(folder, files))
    return readings


def oom_counter(pid: int) -> Path | None:
    """File that counts the OOM kills in a process's memory cgroup; None if there is none."""
    folders = cgroup_folders(CGROUP_ROOT, _text(PROC / str(pid) / "cgroup") or "")
    return next((f / files.events for f, files in folders if (f / files.events).exists()), None)


def oom_kills(counter: Path) -> int | None:
    """The number in such a file; None if it cannot be read."""
    lines = (line.split() for line in _lines(counter))
    return next((_number(words[1]) for words in lines if words[:1] == ["oom_kill"]), None)


def cgroup_folders(root: Path, membership: str) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Folders of the memory cgroups in ``/proc/self/cgroup`` text, innermost first.

    In a container the path is often the host's and does not exist below the mount;
    then the mount's own root is the container's cgroup, and the walk ends there.
    """
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            base, files = root, _V2
        elif "memory" in controllers.split(","):
            base, files = root / "memory", _V1
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), files


def _cgroup_readings(folder: Path, files: _CgroupFiles) -> Iterator[MemoryReading]:
    used = _number(_text(folder / files.usage))
    if used is None:
        return
    stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    reclaimable = sum(_number(stat.get(name)) or 0 for name in files.reclaimable)
    for name in files.limits:
        limit = _number(_text(folder / name))
        if limit is not None and limit < _V1_UNLIMITED:
            yield MemoryReading(str(folder / name), limit - max(used - reclaimable, 0))


def _meminfo_available(path: Path) -> int | None:
    for line in _lines(path):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            kibibytes = _number(rest.removesuffix("kB"))
            return None if kibibytes is None else 1024 * kibibytes
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        # Not every kernel has every file, and a container hides some: no limit is known then.
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()


def _number(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdecimal() else None
