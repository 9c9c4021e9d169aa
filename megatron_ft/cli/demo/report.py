"""The result of a demo: recoveries and comparison, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.common import say
from megatron_ft.cli.demo.faults import DemoRecovery
from megatron_ft.cli.demo.settings import DemoSettings

if TYPE_CHECKING:
    from megatron_ft.cli.demo.final_state import Comparison

_MEBI = 2**20
_SHOWN_DIFFERENCES = 12
UNRECOVERABLE = 10


@dataclass
class DemoReport:
    """Everything that a demo found; parts that a stopped run never came to are None."""

    settings: DemoSettings
    exit_code: int = 1
    reason: str | None = None
    recoveries: list[DemoRecovery] = field(default_factory=list)
    comparison: Comparison | None = None
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
        }


def show(report: DemoReport) -> None:
    """Print the table of restarts and the verdict."""
    for line in ("", *_event_table(report.recoveries), verdict(report)):
        say(line)


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
    ("", "restart"),
    ("training", "again after"),
)
_TO_THE_LEFT = (0, 3, 6)


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
            ", ".join(f"{len(ranks)} {kind}" for kind, ranks in event.starts.items()) or "-",
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


def _seconds(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} s"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
