"""The result of a demo: recoveries, comparison and the cost of snapshots, as data and as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.chaos.follow import RecordedEvent
from megatron_ft.cli.chaos.trace import TraceLine
from megatron_ft.cli.common import say
from megatron_ft.cli.demo.faults import DemoRecovery
from megatron_ft.cli.demo.settings import DemoSettings

if TYPE_CHECKING:
    from megatron_ft.cli.demo.final_state import Comparison

_MEBI = 2**20
_SHOWN_DIFFERENCES = 12
UNRECOVERABLE = 10


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Cost of snapshots in seconds; a snapshot's stall is that of its slowest rank.

    ``share`` is all stalls over the time of all iterations.  Median iteration times leave out
    the first iteration of each incarnation; on few cores they also hold what SMPs and encoders
    take.
    """

    snapshots: int
    protected: int
    local: int
    stall_median: float
    stall_worst: float
    share: float
    iteration_with: float
    iteration_without: float


def overhead(
    events: Sequence[RecordedEvent], ours: Sequence[TraceLine], oracle: Sequence[TraceLine]
) -> Overhead:
    """The cost of snapshots, from one rank's lines of both runs; both must hold iterations."""
    stalls: dict[str, float] = {}
    for cost in (e for e in events if e["kind"] == "capture_cost"):
        stalls[cost["snapshot"]] = max(cost["stall_seconds"], stalls.get(cost["snapshot"], 0.0))
    levels = [e["level"] for e in events if e["kind"] == "committed"]
    return Overhead(
        snapshots=len(stalls),
        protected=levels.count("protected"),
        local=levels.count("local"),
        stall_median=median(stalls.values()) if stalls else 0.0,
        stall_worst=max(stalls.values(), default=0.0),
        share=sum(stalls.values()) / sum(line.seconds for line in ours),
        iteration_with=_median_seconds(ours),
        iteration_without=_median_seconds(oracle),
    )


def _median_seconds(lines: Sequence[TraceLine]) -> float:
    """Median time of an iteration, each incarnation's first one left out where others are there."""
    pairs = zip(lines, lines[1:], strict=False)
    later = [after.seconds for before, after in pairs if before.incarnation == after.incarnation]
    return median(later or [line.seconds for line in lines])


@dataclass
class DemoReport:
    """Everything that a demo found; parts that a stopped run never came to are None."""

    settings: DemoSettings
    exit_code: int = 1
    reason: str | None = None
    recoveries: list[DemoRecovery] = field(default_factory=list)
    comparison: Comparison | None = None
    overhead: Overhead | None = None
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """True if both runs were compared and do not differ in a bit."""
        return self.comparison is not None and self.comparison.identical

    def as_json(self) -> dict[str, Any]:
        """The whole report as plain values."""
        return {
            "identical": self.identical,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 1),
            "settings": asdict(self.settings),
            "events": [asdict(event) for event in self.recoveries],
            "comparison": self.comparison and asdict(self.comparison),
            "overhead": self.overhead and asdict(self.overhead),
        }


def show(report: DemoReport) -> None:
    """Print the table of restarts, the cost of snapshots, and the verdict."""
    say("")
    for line in (*_event_table(report.recoveries), *_overhead_lines(report.overhead)):
        say(line)
    say("")
    say(verdict(report))


def verdict(report: DemoReport) -> str:
    """The answer in a sentence, and what speaks against it if something does."""
    result = report.comparison
    if report.exit_code == 0 and result is not None:
        return (
            "IDENTICAL to the run that was never interrupted, bit by bit, on "
            f"{report.settings.world_size} ranks:\n  {result.losses} losses, {result.samples} "
            f"sample indices, {result.tensors} tensors ({result.bytes / _MEBI:.1f} MiB: weights, "
            f"optimizer, random states)\n  and {result.values} other values."
        )
    if result is not None and result.differences:
        shown = [f"  {text}" for text in result.differences[:_SHOWN_DIFFERENCES]]
        more = len(result.differences) - len(shown)
        return "\n".join(["DIFFERENT at:", *shown, *([f"  and {more} more"] if more else [])])
    return f"STOPPED with exit code {report.exit_code}: {report.reason}{_advice(report)}"


def _advice(report: DemoReport) -> str:
    settings = report.settings
    parity = settings.scheme.parity_members
    if report.exit_code != UNRECOVERABLE or settings.lose <= parity:
        return ""
    return (
        f"\nThat is the right answer: {settings.protect} survives the loss of {parity} of "
        f"{settings.scheme.members} nodes at once, and {settings.lose} were lost. A scheme with "
        f"{settings.lose} parity members continues."
    )


_HEADINGS = (
    ("", "killed"),
    ("in", "iteration"),
    ("noticed", "after"),
    ("restored", "from"),
    ("back to", "iteration"),
    ("iterations", "lost"),
    ("training", "again after"),
)
_TO_THE_LEFT = (0, 3)


def _event_table(events: Iterable[DemoRecovery]) -> list[str]:
    """The faults and the recovery from each, as lines; none if nothing struck."""
    rows = [
        (
            event.victim,
            f"{event.during} at {event.fraction:.0%}",
            _seconds(event.detect, 2),
            event.source or "-",
            _or_dash(event.restored_iteration),
            _or_dash(event.iterations_lost),
            _seconds(event.seconds_to_first_iteration, 1),
        )
        for event in events
    ]
    if not rows:
        return []
    table = [*zip(*_HEADINGS, strict=True), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place in _TO_THE_LEFT else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    rule = "-" * max(map(len, lines))
    return ["Faults and recoveries", *lines[:2], rule, *lines[2:], ""]


def _overhead_lines(cost: Overhead | None) -> list[str]:
    if cost is None:
        return []
    levels = f"{cost.protected} protected" + f", {cost.local} local only" * (cost.local > 0)
    return [
        f"snapshots  {cost.protected + cost.local} committed ({levels})",
        f"overhead   {cost.share:.2%} of all iteration time; a snapshot holds training for "
        f"{1000 * cost.stall_median:.1f} ms (worst {1000 * cost.stall_worst:.1f} ms)",
        f"iteration  {1000 * cost.iteration_with:.0f} ms with snapshots, "
        f"{1000 * cost.iteration_without:.0f} ms uninterrupted; here all nodes share "
        f"{os.cpu_count()} cores",
    ]


def _seconds(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} s"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
