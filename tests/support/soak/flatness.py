"""Does something grow?  Decided from samples, without input or output.

Processes of a role come and go with faults, and no two are alike, so growth is looked for
within each: the slope is that of one least-squares fit for all processes of a role, each
with a level of its own (its mean is taken off first).  A process's first samples are its
warm-up and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tests.support.soak.measure import ROLES, Sample

KIB, MIB = 1 << 10, 1 << 20


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
"""A process's samples that are left out, so many or this share: imports, buffers and arenas come
by and by, and a supervisor's first recovery is a first time for much of its code.
"""

FEWEST = 4
"""Samples after the warm-up from which a process tells something."""


@dataclass(frozen=True)
class Line:
    """One quantity of one role.  ``first`` and ``last`` are means over its processes.

    ``slope`` is per snapshot, ``rise`` the largest of any process over its value at a fifth of
    its samples; ``processes`` how many had enough samples, none being no proof of anything.
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
    """A line for every role and quantity."""
    working = (one for one in samples if not is_spare(one))
    ordered = sorted(working, key=lambda one: (one.role, one.pid, one.snapshots))
    incarnations: dict[str, list[list[Sample]]] = {role: [] for role in roles}
    for (role, _), group in groupby(ordered, key=lambda one: (one.role, one.pid)):
        incarnation = list(group)
        incarnation = incarnation[max(warm_up, int(WARM_SHARE * len(incarnation))) :]
        if role in incarnations and len(incarnation) >= FEWEST:
            incarnations[role].append(incarnation)
    return [_line(role, _of(role, bound), incarnations[role]) for role in roles for bound in bounds]


def is_spare(one: Sample) -> bool:
    """Whether this is an SMP that has no arena: it takes up more once its node is needed."""
    return one.role == "smp" and one.shared == 0


def _of(role: str, bound: Bound) -> Bound:
    factor = TRAINING.get(bound.quantity, 1.0) if role == "trainer" else 1.0
    return replace(bound, slope=factor * bound.slope)


def _line(role: str, bound: Bound, incarnations: Sequence[Sequence[Sample]]) -> Line:
    series = [
        [(float(one.snapshots), float(getattr(one, bound.quantity))) for one in incarnation]
        for incarnation in incarnations
    ]
    count = len(series)
    return Line(
        role,
        bound,
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
