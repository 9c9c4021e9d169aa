"""Cores for the threads of a rank: by the machine, not by a constant.

A launcher may bind each rank to cores of its own, or let all of a node's ranks run on all cores.
Cores of its own are a part of what the processes of the container or job step may use, so the
rank's share is its even part of that, of the cores that it may run on at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

MOST_THREADS = 16
"""Of one rank: a core verifies and copies about 5 GB/s, so twelve fill a PCIe 5 link."""

MOST_DIGEST_THREADS = 8
"""Of one rank beside training: a core digests about 10 GB/s, so six follow such a link."""

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def own_cores(
    environment: Mapping[str, str] | None = None, cgroups: Path = CGROUPS, proc: Path = PROC
) -> int:
    """This process's share of the cores, at least 1.

    LOCAL_WORLD_SIZE says how many ranks share them, as torchrun sets it.
    """
    variables = os.environ if environment is None else environment
    text = variables.get("LOCAL_WORLD_SIZE", "1")
    ranks = max(1, int(text)) if text.isdigit() else 1
    return share_of(len(os.sched_getaffinity(0)), shared_cores(cgroups, proc), ranks)


def share_of(may_run_on: int, shared: int, ranks: int) -> int:
    """The share of one of ``ranks`` ranks of ``shared`` cores, if it may run on so many."""
    return max(1, min(may_run_on, shared // ranks))


def shared_cores(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Cores that the container or job step may use: of the machine, its cpuset, and its quota.

    Read from cgroup v2; where there is none, all cores of the machine.
    """
    found = os.cpu_count() or 1
    cpuset = next(_texts(cgroups, proc, "cpuset.cpus.effective"), "")
    if cpuset:
        found = min(found, _count(cpuset))
    for quota in _texts(cgroups, proc, "cpu.max"):
        most, _, period = quota.partition(" ")
        if most.isdigit() and period.isdigit():
            found = min(found, max(1, int(most) // max(1, int(period))))
    return found


def _texts(cgroups: Path, proc: Path, name: str) -> Iterator[str]:
    """The contents of this file of our cgroup and of all above it, innermost first."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = cgroups / path.strip("/")
    for one in (folder, *folder.parents):
        if one.is_relative_to(cgroups):
            with suppress(OSError):
                yield (one / name).read_text().strip()


def _count(cpus: str) -> int:
    """The number of CPUs in a list as the kernel writes it, such as 0-3,8."""
    ends = (part.split("-") for part in cpus.split(",") if part)
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
