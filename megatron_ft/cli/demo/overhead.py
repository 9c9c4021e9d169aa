"""What snapshots cost the training, from what the trainers reported and the traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_ft.cli.demo.record import Record
from megatron_ft.cli.demo.trace import TraceLine
from megatron_ft.core.identity import SnapshotId


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What snapshots cost.  Seconds; a snapshot's stall is that of its slowest rank.

    ``share`` is all stalls over the time of all iterations; ``stall_per_iteration`` the
    median stall over the median iteration.  Median iteration times leave out the first
    iteration of each life; on few cores they also hold what SMPs and encoders take.
    """

    snapshots: int
    protected: int
    local: int
    given_up: tuple[str, ...]
    stall_median: float
    stall_worst: float
    share: float
    stall_per_iteration: float
    iteration_with: float
    iteration_without: float


def overhead(record: Record, ours: Sequence[TraceLine], oracle: Sequence[TraceLine]) -> Overhead:
    """The cost of snapshots, from one rank's lines of both runs; both must hold iterations."""
    stalls: dict[SnapshotId, float] = {}
    for cost in record.costs:
        stalls[cost.snapshot] = max(cost.stall_seconds, stalls.get(cost.snapshot, 0.0))
    with_snapshots, without = _median_seconds(ours), _median_seconds(oracle)
    stall = median(stalls.values()) if stalls else 0.0
    return Overhead(
        snapshots=len(stalls),
        protected=record.count("committed", level="protected"),
        local=record.count("committed", level="local"),
        given_up=tuple(s.event.text for s in record.seen if s.event.kind == "aborted"),
        stall_median=stall,
        stall_worst=max(stalls.values(), default=0.0),
        share=sum(stalls.values()) / sum(line.seconds for line in ours),
        stall_per_iteration=stall / with_snapshots,
        iteration_with=with_snapshots,
        iteration_without=without,
    )


def _median_seconds(lines: Sequence[TraceLine]) -> float:
    """Median time of an iteration, each life's first one left out where others are there."""
    later = [b.seconds for a, b in zip(lines, lines[1:], strict=False) if _same_life(a, b)]
    return median(later or [line.seconds for line in lines])


def _same_life(one: TraceLine, other: TraceLine) -> bool:
    return one.incarnation == other.incarnation
