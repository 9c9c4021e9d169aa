"""Which CPUs the processes beside training run on."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from megatron_ft.core.errors import ConfigError

BACKGROUND_CPUS = "MEGATRON_FT_BACKGROUND_CPUS"
"""The environment variable that tells SMPs, encoders and drains their CPUs; empty: any."""

ONLINE = Path("/sys/devices/system/cpu/online")
MOST_CPUS = 1 << 16


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers from a list such as ``0-3,8``, as in cpuset(7).  ValueError if it is none."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"{part!r} is no CPU and no range of CPUs")
        low, high = int(first), int(last or first)
        if not low <= high < MOST_CPUS:
            raise ValueError(f"{part!r} is no range of CPUs")
        found.update(range(low, high + 1))
    return frozenset(found)


def shown(cpus: Collection[int]) -> str:
    """The same list, as short as it can be."""
    ordered = sorted(cpus)
    starts = [cpu for cpu in ordered if cpu - 1 not in cpus]
    ends = [cpu for cpu in ordered if cpu + 1 not in cpus]
    pairs = zip(starts, ends, strict=True)
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in pairs)


def bind_to_background_cpus(online: Path = ONLINE) -> None:
    """Keep this process, and all that it starts, on the CPUs that the job gives to background work.

    ConfigError if this machine lacks some of them, or does not let this job have them.
    """
    text = os.environ.get(BACKGROUND_CPUS, "")
    if not text:
        return
    wanted, there = parse_cpus(text), parse_cpus(online.read_text().strip())
    if missing := wanted - there:
        raise ConfigError(
            f"background_cpus is {text}, but this machine has no CPU {shown(missing)}: it has "
            f"{shown(there)}; name CPUs that every node has"
        )
    try:
        os.sched_setaffinity(0, wanted)
        refused = wanted - os.sched_getaffinity(0)
    except OSError:
        refused = wanted
    if refused:
        raise ConfigError(
            f"background_cpus is {text}, but this job may not use CPU {shown(refused)} here: its "
            "cgroup or allocation lacks it; name CPUs that it has on every node"
        )
