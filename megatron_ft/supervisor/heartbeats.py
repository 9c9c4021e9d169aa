"""The progress of all trainers as heartbeats bring it, and what follows from it.

``Heartbeats`` keeps each rank's newest report.  ``RecoveryClock`` measures how long the job needs
from a failure to its next iteration.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.rpc.heartbeat_page import GONE, PulseReport, TrainerPhase


@dataclass(frozen=True)
class RankReport:
    """One rank's last report, and when it came by the supervisor's monotonic clock."""

    shard: str
    node: str
    at: float
    report: PulseReport

    @property
    def first_ended(self) -> float:
        """Time at which the first iteration ended, by the supervisor's clock, not its node's."""
        return self.at - (self.report.marked + self.report.idle - self.report.first)

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

    def by_node(self) -> dict[str, dict[str, Any]]:
        """Each node's ranks: how many, their least iteration, and the one that is silent longest.

        ``silent`` is in seconds since its last mark.
        """
        now, nodes = time.monotonic(), dict[str, list[RankReport]]()
        for one in self._heard.values():
            nodes.setdefault(one.node, []).append(one)
        slowest = {node: max(heard, key=lambda one: one.idle(now)) for node, heard in nodes.items()}
        return {
            node: {
                "ranks": len(heard),
                "iteration": min(one.report.iteration for one in heard),
                "silent": round(slowest[node].idle(now), 1),
                "rank": slowest[node].report.rank,
                "phase": TrainerPhase(slowest[node].report.phase).name.lower(),
            }
            for node, heard in nodes.items()
        }

    def all(self) -> list[RankReport]:
        """The newest reports, by rank; those of ranks that have ended are as of their end."""
        return sorted(list(self._heard.values()), key=lambda heard: heard.report.rank)

    @property
    def iteration_seconds(self) -> float:
        """The usual length of an iteration of the slowest rank, 0 while nobody knows."""
        return max((one.report.typical for one in self.all()), default=0.0)

    def fresh(self, ranks: int, age: float) -> list[RankReport]:
        """Reports of all ranks, by rank, if none is older than ``age`` s; else an empty list.

        The silence of a node, or a supervisor that was suspended, is no sign of missing progress.
        """
        since = time.monotonic() - age
        heard = [one for one in self.all() if one.report.state != GONE]
        whole = len(heard) == ranks and all(one.at >= since for one in heard)
        return heard if whole else []


PARTS = ("detect", "kill", "decide", "rebuild", "start", "iterate")
"""Parts of a recovery, in their order in time."""


@dataclass(frozen=True)
class RecoveryTime:
    """One recovery: seconds of its parts, and how each rank came up.

    ``detect``: from the last sign of progress (hang) or of the node (silence); the kernel reports
    the end of a process at once.  ``kill``: until no trainer of the old incarnation runs.
    ``decide``: until it is decided what to restore: waiting after repeated failures, fencing by
    the SMPs, failed attempts.  ``rebuild``: until memory holds it.  ``start``: until all ranks
    have registered.  ``iterate``: until all have ended their first iteration.

    ``starts`` maps each of STARTS that occurred to its ranks.
    """

    cause: str
    detect: float
    kill: float
    decide: float
    rebuild: float
    start: float
    iterate: float
    starts: Mapping[str, Sequence[int]]

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {name: round(getattr(self, name), 3) for name in PARTS}

    @property
    def total(self) -> float:
        """From the fault to the end of the first iteration of the last rank."""
        return float(sum(getattr(self, name) for name in PARTS))

    def restart(self) -> str:
        """Ranks by the way in which they came up, for people."""
        return "; ".join(f"{in_ranges(ranks)} {kind}" for kind, ranks in self.starts.items())

    def describe(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.parts().items())
        again = f"training again {self.total:.2f} s after {self.cause}"
        return f"{again}: {parts}; restart of ranks: {self.restart()}"


def in_ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text: ``0-2,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class RecoveryClock:
    """Notes when an incarnation ended, and when each step to the next one was done."""

    def __init__(self) -> None:
        self._cause = ""
        self._detect = self._failed = self._dead = 0.0
        self._decided = self._started = self._registered = 0.0
        self._starts: Mapping[str, Sequence[int]] = {}
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

    def starting(self, decided: float) -> None:
        """Note that trainers of a new incarnation are about to be started.

        ``decided`` is when it was decided what they restore.
        """
        self._decided, self._started = decided, time.monotonic()
        self._waiting, self._down = bool(self._cause), False

    def registered(self, starts: Mapping[str, Sequence[int]]) -> None:
        """Note that all ranks have registered; ``starts`` is RecoveryTime's."""
        self._registered, self._starts = time.monotonic(), starts

    def poll(self, heard: Sequence[RankReport]) -> RecoveryTime | None:
        """The recovery that has just ended, returned once."""
        if not self._waiting or not heard or not all(one.report.done for one in heard):
            return None
        recovery = RecoveryTime(
            self._cause,
            self._detect,
            self._dead - self._failed,
            self._decided - self._dead,
            self._started - self._decided,
            self._registered - self._started,
            max(one.first_ended for one in heard) - self._registered,
            self._starts,
        )
        self._waiting, self._cause, self._detect = False, "", 0.0
        return recovery
