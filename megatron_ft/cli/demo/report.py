"""The result of a demo: recoveries and comparison, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.common import say
from megatron_ft.cli.demo.faults import DemoRecovery
from megatron_ft.cli.demo.settings import DemoSettings
from megatron_ft.cli.ledger import lines
from megatron_ft.cli.run import EXIT_UNRECOVERABLE
from megatron_ft.supervisor.ledger import Ledger

if TYPE_CHECKING:
    from megatron_ft.cli.demo.final_state import Comparison

_MEBI = 2**20
_SHOWN_DIFFERENCES = 12


@dataclass(frozen=True, kw_only=True)
class DemoReshape:
    """A reshape as the job has measured it.

    ``tensors`` is how many the snapshot of ``iteration`` has, before or after, and
    ``identical_tensors`` how many are equal bit by bit in both layouts; the names of the others
    are in ``different``.  Bytes are those of the new shards, of shards that were rebuilt from
    parity, and of what encoders read from storage while they filled new ones (None where the
    kernel does not count it).
    """

    iteration: int
    tensors: int
    identical_tensors: int
    different: Sequence[str]
    bytes_needed: int
    bytes_decoded: int
    storage_bytes_read: int | None
    seconds: float


@dataclass
class DemoReport:
    """Everything that a demo found; parts that a stopped run never came to are None."""

    settings: DemoSettings
    exit_code: int = 1
    reason: str | None = None
    recoveries: list[DemoRecovery] = field(default_factory=list)
    comparison: Comparison | None = None
    reshape: DemoReshape | None = None
    corruption: Sequence[str] = ()
    ledger: Ledger | None = None
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        return self.comparison is not None and self.comparison.identical

    def as_json(self) -> dict[str, Any]:
        layout = self.settings.reshape
        measured = {} if self.reshape is None else asdict(self.reshape)
        reshape = {name: value for name, value in measured.items() if value is not None}
        return {
            "identical": self.identical,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 1),
            "settings": {**asdict(self.settings), "reshape": layout and str(layout)},
            "events": [asdict(event) for event in self.recoveries],
            "comparison": self.comparison and asdict(self.comparison),
            "ledger": self.ledger and self.ledger.to_dict(),
            **({"reshape": reshape} if reshape else {}),
            **({"corruption": self.corruption} if self.corruption else {}),
        }


def show(report: DemoReport) -> None:
    accounts = () if report.ledger is None else (*lines("the job", report.ledger), "")
    result = (verdict(report), *report.corruption)
    for line in ("", *_event_table(report.recoveries), *accounts, *result):
        say(line)


def verdict(report: DemoReport) -> str:
    result = report.comparison
    if report.exit_code == 0 and result is not None and report.reshape is not None:
        return _reshaped(report.settings, result, report.reshape)
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


def _reshaped(settings: DemoSettings, result: Comparison, found: DemoReshape) -> str:
    stored = found.storage_bytes_read
    storage = "" if stored is None else f", {stored} read from disk"
    lines = (
        "IDENTICAL to the run that was never interrupted, bit by bit, up to iteration "
        f"{found.iteration}:",
        f"  {result.losses} losses and {result.samples} sample indices.",
        f"RESHAPED in {found.seconds:.2f} s in memory, {settings.layout} to {settings.reshape}:",
        f"  all {found.identical_tensors} tensors of the unsharded model and its optimizer are "
        "identical, bit by bit;",
        f"  {found.bytes_needed} bytes filled the new shards, {found.bytes_decoded} were decoded "
        f"from parity{storage}.",
        f"Iterations {found.iteration + 1} to {settings.all_iterations} used the same samples, and "
        f"losses differ by {result.deviation:.1e} of their value",
        "  at most: sums are taken in another order.",
    )
    return "\n".join(lines)


def _advice(report: DemoReport) -> str:
    settings = report.settings
    parity = settings.scheme.parity_members
    if report.exit_code != EXIT_UNRECOVERABLE or settings.lose <= parity:
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
    rows = [
        (
            event.victim,
            f"{event.during}" + (f" at {event.fraction:.0%}" if event.fraction else ""),
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
