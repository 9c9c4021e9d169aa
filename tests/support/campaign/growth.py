"""Does something grow?  Memory, descriptors and threads of a job's processes, and the verdict.

Processes of a role come and go with faults, and no two are alike, so growth is looked for
within each: the slope is that of one least-squares fit for all processes of a role, each
with a level of its own (its mean is taken off first).  A process's first samples are its
warm-up and are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inject import role_of
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from tests.support.warm_host import is_client

ROLES = ("supervisor", "smp", "encoder", "trainer")
RESTARTED_ROLES = ("supervisor", "smp", "host", "trainer")
"""Processes that are judged where trainers restart in a row; encoders end too soon for that."""

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sample:
    """One process at one moment, ``snapshots`` having been taken by then.

    Bytes: ``anonymous`` is resident memory of no file, shared with whom it was forked from or
    not; ``shared`` resident memory of tmpfs files, that is of arenas (proc(5)).
    """

    role: str
    pid: int
    snapshots: int
    anonymous: int
    shared: int
    descriptors: int
    threads: int


@dataclass
class Growth:
    """Samples of one job's processes, taken every few protected snapshots."""

    every: int = 5
    samples: list[Sample] = field(default_factory=list)
    _due: int = 0

    def look(self, follower: Follower, since: float) -> None:
        """Sample, if it is time and the job is settled after what was done to it at ``since``.

        Without an encoder world, snapshots are many and processes are just being started.
        """
        taken = follower.protected_commits()
        if taken < self._due or follower.protected_commits(since) < 2:
            return
        self._due = taken + self.every
        running = [*in_use(roles(follower.job.spec.name)), ("supervisor", follower.process.pid)]
        found = (sample(role, pid, taken) for role, pid in running)
        self.samples += [one for one in found if one is not None]


def roles(job: str) -> list[tuple[str, int]]:
    """Role and number of every SMP, encoder, trainer host and trainer of a job that runs."""
    environments = {pid: procfs.read_environment(pid) for pid in procfs.own_processes()}
    ours = {pid: e for pid, e in environments.items() if e.get(JOB) == job and NODE in e}
    return [(role_of(pid, variables), pid) for pid, variables in ours.items() if not is_client(pid)]


def in_use(processes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of ``roles``, less hosts without a trainer.

    Such a host still imports, or takes up more once it forks.
    """
    parents = {procfs.read_status(p).get("PPid") for role, p in processes if role == "trainer"}
    return [(role, pid) for role, pid in processes if role != "host" or str(pid) in parents]


def sample(role: str, pid: int, snapshots: int) -> Sample | None:
    """A process now; None if it has gone."""
    status = procfs.read_status(pid)
    try:
        descriptors = len(os.listdir(Path(f"/proc/{pid}/fd")))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "RssAnon" not in status:
        return None  # a zombie
    anonymous, shared = (KIB * int(status[n].split()[0]) for n in ("RssAnon", "RssShmem"))
    return Sample(role, pid, snapshots, anonymous, shared, descriptors, int(status["Threads"]))


@dataclass(frozen=True)
class Bound:
    """Bound of a quantity: it may rise by ``slope`` a snapshot on average, and by ``rise`` over the
    value that it had after a fifth of a process's incarnation.
    """

    quantity: str
    slope: float
    rise: float


BOUNDS = (
    Bound("anonymous", 4 * KIB, 12 * MIB),
    Bound("shared", 4 * KIB, 12 * MIB),
    Bound("descriptors", 0.01, 8),
    Bound("threads", 0.005, 4),
)
"""A thousand snapshots may thus leave 4 MiB, ten descriptors and five threads behind them.

A process that kept one 64 KiB block of every sixteenth snapshot, or one descriptor of every
hundredth, would be found.
"""

TRAINING = {"anonymous": 4.0}
"""By how much more a trainer's may rise: the same training without us grows by about 1.4 MiB
from iteration 300 to 1500, and there are several iterations to a snapshot.
"""

WARM_UP, WARM_SHARE = 2, 0.2
"""A process's samples that are left out, this number or share: imports, buffers and arenas come
by and by, and a supervisor's first recovery is a first time for much of its code.
"""

FEWEST = 4
"""Samples after the warm-up from which a process tells something."""


@dataclass(frozen=True)
class Line:
    """One quantity of one role.  ``first`` and ``last`` are means over its processes.

    ``slope`` is per snapshot, ``rise`` the largest of any process over its value at a fifth of
    its samples; ``processes`` is the number that had enough samples, none being no proof.
    """

    role: str
    bound: Bound
    processes: int
    samples: int
    first: float
    last: float
    slope: float
    rise: float

    @property
    def flat(self) -> bool:
        """Whether it stayed within its bounds, and was looked at at all."""
        within = self.slope <= self.bound.slope and self.rise <= self.bound.rise
        return within and self.processes > 0


def judge(
    samples: Iterable[Sample],
    bounds: Sequence[Bound] = BOUNDS,
    roles: Sequence[str] = ROLES,
    warm_up: int = WARM_UP,
) -> list[Line]:
    # An SMP that has no arena is a spare's: it takes up more once its node is needed.
    working = (one for one in samples if one.role != "smp" or one.shared)
    ordered = sorted(working, key=lambda one: (one.role, one.pid, one.snapshots))
    incarnations: dict[str, list[list[Sample]]] = {role: [] for role in roles}
    for (role, _), group in groupby(ordered, key=lambda one: (one.role, one.pid)):
        incarnation = list(group)
        incarnation = incarnation[max(warm_up, int(WARM_SHARE * len(incarnation))) :]
        if role in incarnations and len(incarnation) >= FEWEST:
            incarnations[role].append(incarnation)
    return [_line(role, bound, incarnations[role]) for role in roles for bound in bounds]


def _line(role: str, bound: Bound, incarnations: Sequence[Sequence[Sample]]) -> Line:
    factor = TRAINING.get(bound.quantity, 1.0) if role == "trainer" else 1.0
    series = [
        [(float(one.snapshots), float(getattr(one, bound.quantity))) for one in incarnation]
        for incarnation in incarnations
    ]
    count = len(series)
    return Line(
        role,
        replace(bound, slope=factor * bound.slope),
        processes=count,
        samples=sum(map(len, series)),
        first=sum(points[0][1] for points in series) / max(count, 1),
        last=sum(points[-1][1] for points in series) / max(count, 1),
        slope=common_slope(series),
        rise=max((rise(points) for points in series), default=0.0),
    )


Points = Sequence[tuple[float, float]]


def common_slope(series: Sequence[Points]) -> float:
    """Slope of the least-squares fit in which every series has an intercept of its own."""
    above = below = 0.0
    for points in series:
        x_mean = sum(x for x, _ in points) / len(points)
        y_mean = sum(y for _, y in points) / len(points)
        above += sum((x - x_mean) * (y - y_mean) for x, y in points)
        below += sum((x - x_mean) ** 2 for x, _ in points)
    return above / below if below else 0.0


def rise(points: Points) -> float:
    """The highest value over the one at a fifth of the series."""
    start = len(points) // 5
    return max(y for _, y in points[start:]) - points[start][1]


def growth_table(lines: Iterable[Line]) -> list[str]:
    """Each role's processes and what they had, as lines of Markdown; sizes in KiB."""
    head = "| role | what | processes | samples | first | last | slope a snapshot | rise | |"
    rows = [head, "| --- | --- |" + " ---: |" * 6 + " --- |"]
    for line in lines:
        unit = KIB if line.bound.quantity in ("anonymous", "shared") else 1
        rise = f"{line.rise / unit:.0f} ({line.bound.rise / unit:g})"
        slope = f"{line.slope / unit:.4f} ({line.bound.slope / unit:g})"
        level = f"{line.first / unit:.0f} | {line.last / unit:.0f}"
        names = f"{line.role} | {line.bound.quantity} | {line.processes} | {line.samples}"
        flat = "flat" if line.flat else "NOT FLAT"
        rows.append(f"| {names} | {level} | {slope} | {rise} | {flat} |")
    return rows
