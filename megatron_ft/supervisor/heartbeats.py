"""The progress of all trainers as heartbeats bring it, and what follows from it.

``Heartbeats`` keeps each rank's newest report.  ``StragglerFinder`` compares ranks that do the
same work, ``RecoveryClock`` measures how long the job needs from a failure to its next iteration.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from megatron_ft.rpc.heartbeat_page import PulseReport
from megatron_ft.trainer.heartbeats import WINDOW, WindowSummary


@dataclass(frozen=True)
class RankReport:
    """One rank's last report, and when it came by the supervisor's monotonic clock."""

    shard: str
    node: str
    at: float
    report: PulseReport

    def idle(self, now: float) -> float:
        """Seconds since the rank's last mark, if it has passed none since the report."""
        return self.report.idle + now - self.at


class Heartbeats:
    """The newest report of each rank in the present incarnation."""

    def __init__(self) -> None:
        self._heard: dict[str, RankReport] = {}

    def record(self, node: str, reports: Mapping[str, PulseReport]) -> None:
        """Record the reports in a node's answer."""
        now = time.monotonic()
        for shard, report in reports.items():
            self._heard[shard] = RankReport(shard, node, now, report)

    def begin_incarnation(self) -> None:
        """Forget reports of trainers that are dead now."""
        self._heard.clear()

    def all(self) -> list[RankReport]:
        """The newest report of each rank, by rank."""
        return sorted(self._heard.values(), key=lambda heard: heard.report.rank)

    def fresh(self, ranks: int, age: float) -> list[RankReport]:
        """Reports of all ranks if none is older than ``age`` seconds, else an empty list.

        The silence of a node, or a supervisor that was suspended, is no sign of missing progress.
        """
        since = time.monotonic() - age
        heard = self.all()
        whole = len(heard) == ranks and all(one.at >= since for one in heard)
        return heard if whole else []


LEAST_SECONDS = 0.001
"""A difference below this does not matter, however short iterations are."""

SIGNIFICANT = 6.0
"""Standard errors that a difference must exceed: with thousands of ranks, four are exceeded by
chance all the time."""

MEDIAN_ERROR = 1.2533 * 1.4826 / math.sqrt(WINDOW)
"""Standard error of the median of a window, in median absolute deviations.

1.2533 (the root of pi / 2) is the ratio to the mean's error, 1.4826 that of standard deviation
to median absolute deviation, both for normally distributed values.
"""

SAMPLING = 0.7
"""A rank slower by exactly the limit is measured below it every second time."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose own part of an iteration is ``excess`` (0.05: 5 %) above its peers'."""

    rank: int
    window: int
    excess: float
    own: float
    peers: float


def find_stragglers(windows: Mapping[int, WindowSummary], percent: float) -> list[Straggler]:
    """The slow ones among ranks that do the same work; ``windows`` are all of one index.

    A rank is compared with the median of the others.  It is named when it is slower by
    ``percent`` (less the error of sampling), by more than chance explains, and by a
    millisecond.  0 percent names nobody, and so does a rank without peers.
    """
    if percent <= 0 or len(windows) < 2:
        return []
    found = (_judge(rank, windows, percent / 100) for rank in sorted(windows))
    return [straggler for straggler in found if straggler is not None]


def _judge(rank: int, windows: Mapping[int, WindowSummary], limit: float) -> Straggler | None:
    mine = windows[rank]
    others = [w for r, w in windows.items() if r != rank]
    peers = median(w.own for w in others)
    excess = mine.own - peers
    error = MEDIAN_ERROR * math.hypot(mine.spread, median(w.spread for w in others))
    least = max(SAMPLING * limit * peers, SIGNIFICANT * error, LEAST_SECONDS)
    if peers <= 0 or excess < least:
        return None
    return Straggler(rank, mine.index, excess / peers, mine.own, peers)


_DATA_PARALLEL = re.compile(r"dp\d+")


class StragglerFinder:
    """Compares ranks that hold the same part of the model, on data of their own."""

    def __init__(self, percent: float) -> None:
        self._percent = percent
        self._judged: dict[str, int] = {}
        self._slow: dict[str, dict[int, Straggler]] = {}

    @property
    def present(self) -> list[Straggler]:
        """The stragglers of the newest windows."""
        return [one for group in self._slow.values() for one in group.values()]

    def begin_incarnation(self) -> None:
        """Ranks may be on other nodes now, and start at another iteration."""
        self._judged.clear()
        self._slow.clear()

    def poll(self, heard: Sequence[RankReport]) -> list[str]:
        """New and former stragglers since the last call, in words."""
        groups: dict[str, list[RankReport]] = defaultdict(list)
        for one in heard:
            groups[_DATA_PARALLEL.sub("dp", one.shard)].append(one)
        return [text for name, members in groups.items() for text in self._judge(name, members)]

    def _judge(self, name: str, members: Sequence[RankReport]) -> list[str]:
        indices = {one.report.window for one in members}
        if len(indices) != 1 or (index := indices.pop()) <= self._judged.get(name, -1):
            return []
        self._judged[name] = index
        windows = {
            one.report.rank: WindowSummary(index, one.report.own, one.report.spread)
            for one in members
        }
        before = self._slow.get(name, {})
        now = {s.rank: s for s in find_stragglers(windows, self._percent)}
        self._slow[name] = now
        nodes = {one.report.rank: one.node for one in members}
        fresh = [_describe(now[rank], nodes[rank]) for rank in sorted(now.keys() - before.keys())]
        gone = sorted(before.keys() - now.keys())
        return fresh + [f"rank {rank} on {nodes[rank]} is no straggler any more" for rank in gone]


def _describe(slow: Straggler, node: str) -> str:
    first = slow.window * WINDOW
    return (
        f"rank {slow.rank} on {node} is a straggler: in iterations {first} to {first + WINDOW - 1} "
        f"its own part took {1e3 * slow.own:.1f} ms, {100 * slow.excess:.0f} % more than its "
        f"peers' {1e3 * slow.peers:.1f} ms"
    )


@dataclass(frozen=True)
class RecoveryTime:
    """Seconds of one recovery; of what ranks do, those of the slowest rank for each part.

    ``detect``: from the last sign of progress (hang) or of the node (silence); the kernel reports
    the end of a process at once.  ``kill``: until all trainers are dead.  ``decide``: until
    new ones are started: fencing, the decision, rebuilding or loading, waiting after repeated
    failures.  ``launch``: until a process is there.  ``imports``: until this package is
    imported, beside the framework.  ``communicators``: ``init_process_group``.  ``set_up``: the
    rest up to the restore: building the model, mostly.  ``restore``: copying the shard in.
    ``first_iteration``: up to its end, waiting for all ranks and arenas included.  ``total``:
    from the fault to the end of the first iteration of the last rank.
    """

    cause: str
    detect: float
    kill: float
    decide: float
    launch: float
    imports: float
    communicators: float
    set_up: float
    restore: float
    first_iteration: float
    total: float

    def parts(self) -> dict[str, float]:
        """The parts by name, in their order in time."""
        return {n: round(v, 3) for n, v in asdict(self).items() if n not in ("cause", "total")}

    def describe(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.parts().items())
        return f"training again {self.total:.2f} s after {self.cause}: {parts}"


class RecoveryClock:
    """Notes when an incarnation ended, its trainers were dead and new ones were started.

    Of what happens on nodes only durations are used: clocks of two nodes are never compared.
    """

    def __init__(self) -> None:
        self.done: list[RecoveryTime] = []
        self._cause = ""
        self._detect = 0.0
        self._failed = self._dead = self._started = 0.0
        self._waiting = self._down = False

    def detected(self, seconds: float) -> None:
        """Note how many seconds ago the cause began that ends this incarnation."""
        self._detect = seconds

    def failed(self) -> None:
        """Note the end of an incarnation; one without trainers belongs to the same recovery."""
        if not self._down:
            self._failed, self._waiting = time.monotonic(), False

    def dead(self, cause: str) -> None:
        """Note that the trainers of the ended incarnation are dead."""
        if not self._down:
            self._dead, self._cause, self._down = time.monotonic(), cause, True

    def starting(self) -> None:
        """Note that trainers of a new incarnation are about to be started."""
        self._started, self._waiting = time.monotonic(), bool(self._cause)
        self._down = False

    def poll(self, heard: Sequence[RankReport]) -> RecoveryTime | None:
        """The recovery that has just ended, returned once."""
        reports = [one.report for one in heard]
        if not self._waiting or not reports or not all(r.first_iteration for r in reports):
            return None
        self._waiting = False
        began = [one.at - one.report.age for one in heard]
        ends = [
            start + r.imports + r.communicators + r.set_up + r.restore + r.first_iteration
            for start, r in zip(began, reports, strict=True)
        ]
        recovery = RecoveryTime(
            cause=self._cause,
            detect=self._detect,
            kill=self._dead - self._failed,
            decide=self._started - self._dead,
            launch=max(0.0, max(began) - self._started),
            imports=max(r.imports for r in reports),
            communicators=max(r.communicators for r in reports),
            set_up=max(r.set_up for r in reports),
            restore=max(r.restore for r in reports),
            first_iteration=max(r.first_iteration for r in reports),
            total=max(ends) - self._failed + self._detect,
        )
        self.done.append(recovery)
        self._cause, self._detect = "", 0.0
        return recovery

    def view(self) -> list[dict[str, Any]]:
        """The last recoveries, for ``megatron-ft status --json``."""
        return [{"cause": r.cause, "total": round(r.total, 3), **r.parts()} for r in self.done[-5:]]
