"""Names the rank that is slower than its peers, which wait for it in each iteration.  Pure.

All ranks end an iteration at the same time; what differs is how long each works for it, that is
without what it waits in collectives.  Peers are ranks that differ in data-parallel place only,
and so have the same work to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high

from megatron_ft.core.identity import place_of_shard
from megatron_ft.rpc.heartbeat_page import TrainerPhase
from megatron_ft.supervisor.heartbeats import RankReport

SLOW, USUAL = 1.2, 1.1
"""From the one factor on a rank counts as slow, until it is below the other one."""
LEAST_SHARE = 0.1
"""Less of an iteration than this is not worth an event, whatever the factor."""
SECONDS, ITERATIONS = 20.0, 64
"""A rank is named that has been slow for so long, in both."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank: ``work`` seconds an iteration, ``usual`` is the (upper) median of its peers.

    ``iterations`` is for how many it has been slow.
    """

    rank: int
    node: str
    work: float
    usual: float
    iterations: int

    @property
    def factor(self) -> float:
        """Its working time as a multiple of that of its peers."""
        return self.work / self.usual

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"rank {self.rank} on {self.node} is slow: it works {1e3 * self.work:.0f} ms in an "
            f"iteration, its peers {1e3 * self.usual:.0f} ms ({self.factor:.2f} times as long, "
            f"for {self.iterations} iterations)"
        )


class Stragglers:
    """Watches one incarnation.  ``present`` are the ranks that were named and are still slow."""

    def __init__(self) -> None:
        self.present: dict[int, Straggler] = {}
        self._since: dict[int, tuple[float, int]] = {}

    def judge(self, heard: Sequence[RankReport], now: float) -> list[Straggler]:
        """Ranks to name now, each once until it is no longer slow; ``heard`` is of all ranks."""
        works = {one.report.rank: one.report.work for one in heard}
        if not all(works.values()) or not all(map(_trains, heard)):
            return []
        named = []
        for one, others in _with_peers(heard):
            rank, work, done = one.report.rank, one.report.work, one.report.done
            usual = median_high(works[other] for other in others)
            most = SLOW if rank not in self._since else USUAL
            if work < most * usual:
                self._since.pop(rank, None)
                self.present.pop(rank, None)
                continue
            began, first = self._since.setdefault(rank, (now, done))
            if now - began < SECONDS or done - first < ITERATIONS or work < SLOW * usual:
                continue
            if work - usual < LEAST_SHARE * one.report.typical:
                continue
            found = Straggler(rank, one.node, work, usual, done - first)
            if rank not in self.present:
                named.append(found)
            self.present[rank] = found
        return named


def _trains(one: RankReport) -> bool:
    return one.report.phase == TrainerPhase.TRAINING


def _with_peers(heard: Iterable[RankReport]) -> Iterable[tuple[RankReport, list[int]]]:
    """Each rank that has peers, with these."""
    groups: dict[tuple[int, int, int], list[RankReport]] = {}
    for one in heard:
        if (place := place_of_shard(one.shard)) is not None:
            groups.setdefault((place.pp, place.tp, place.ep), []).append(one)
    for group in groups.values():
        for one in group:
            others = [other.report.rank for other in group if other is not one]
            if others:
                yield one, others
