"""The result of a demo: as data for a program, as tables for a person."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ft.cli.demo.compare import Comparison
from megatron_ft.cli.demo.memory import NodeMemory
from megatron_ft.cli.demo.outcome import Outcome
from megatron_ft.cli.demo.overhead import Overhead
from megatron_ft.cli.demo.settings import DemoSettings

Side = Literal["left", "right"]

_MEBI = 2**20
_SHOWN_DIFFERENCES = 12
UNRECOVERABLE = 10


@dataclass
class Report:
    """Everything that a demo found; parts that a stopped run never came to are None."""

    settings: DemoSettings
    exit_code: int = 1
    reason: str | None = None
    events: list[Outcome] = field(default_factory=list)
    comparison: Comparison | None = None
    overhead: Overhead | None = None
    memory: list[NodeMemory] = field(default_factory=list)
    state_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether both runs were compared and do not differ in a bit."""
        return self.comparison is not None and self.comparison.identical

    def as_json(self) -> dict[str, Any]:
        """The whole report as plain values."""
        comparison = None if self.comparison is None else dataclasses.asdict(self.comparison)
        return {
            "identical": self.identical,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 1),
            "settings": self._settings(),
            "events": [dataclasses.asdict(event) for event in self.events],
            "comparison": comparison,
            "overhead": None if self.overhead is None else dataclasses.asdict(self.overhead),
            "memory": {
                "largest_shard_state_bytes": self.state_bytes,
                "nodes": [dataclasses.asdict(node) for node in self.memory],
            },
            "versions": self.versions,
        }

    def _settings(self) -> dict[str, Any]:
        framework = self.settings.framework
        chosen = {"name": framework.name, **framework.choices()}
        others = [f.name for f in dataclasses.fields(self.settings) if f.name != "framework"]
        return {"framework": chosen, **{name: getattr(self.settings, name) for name in others}}


def show(report: Report, console: Console) -> None:
    """Print the report; the verdict is the caller's last line."""
    console.print()
    if report.events:
        console.print(_event_table(report.events))
    if any(event.restored_iteration is not None for event in report.events):
        console.print(_parts_table(report.events))
    for line in (*_overhead_lines(report), *_memory_lines(report), *_version_lines(report)):
        console.print(Text(line))
    console.print()
    console.print(verdict(report), soft_wrap=True)


def verdict(report: Report) -> Text:
    """The answer in a sentence, and what speaks against it if something does."""
    result = report.comparison
    if report.exit_code == 0 and result is not None:
        return Text.assemble(
            ("IDENTICAL", "bold green"),
            f" to the run that was never interrupted, bit by bit, on {report.settings.world_size} "
            f"ranks:\n  {result.losses} losses, {result.samples} "
            f"{report.settings.framework.samples}, {result.tensors} tensors "
            f"({result.bytes / _MEBI:.1f} MiB: weights, optimizer, random states)\n  and "
            f"{result.values} other values.",
        )
    if result is not None and result.differences:
        shown = [f"  {text}" for text in result.differences[:_SHOWN_DIFFERENCES]]
        more = len(result.differences) - len(shown)
        shown += [f"  and {more} more"] if more else []
        return Text.assemble(("DIFFERENT", "bold red"), " at:\n", "\n".join(shown))
    return Text.assemble(
        ("STOPPED", "bold red"),
        f" with exit code {report.exit_code}: {report.reason}{_advice(report)}",
    )


def _advice(report: Report) -> str:
    settings = report.settings
    parity = settings.scheme.parity_members
    if report.exit_code != UNRECOVERABLE or settings.lose <= parity:
        return ""
    return (
        f"\nThat is the right answer: {settings.protect} survives the loss of {parity} of "
        f"{settings.scheme.members} nodes at once, and {settings.lose} were lost. A scheme with "
        f"{settings.lose} parity members goes on."
    )


def _event_table(events: Iterable[Outcome]) -> Table:
    table = _table(
        "Faults and recoveries",
        ("killed", "left"),
        ("in\niteration", "right"),
        ("noticed\nafter", "right"),
        ("restored\nfrom", "left"),
        ("back to\niteration", "right"),
        ("iterations\nlost", "right"),
        ("training\nagain after", "right"),
    )
    for event in events:
        table.add_row(
            event.victim,
            f"{event.during} at {event.fraction:.0%}",
            _seconds(event.detect, 2),
            event.source or "-",
            _or_dash(event.restored_iteration),
            _or_dash(event.iterations_lost),
            _seconds(event.seconds_to_first_iteration, 1),
        )
    return table


def _parts_table(events: Iterable[Outcome]) -> Table:
    table = _table(
        "Where that time went",
        ("killed", "left"),
        ("notice", "right"),
        ("fence,\ndecide", "right"),
        ("rebuild", "right"),
        ("of it,\ncoding", "right"),
        ("start of\ntrainers", "right"),
        ("of it,\ncopy in", "right"),
        ("first\niteration", "right"),
    )
    for event in events:
        table.add_row(
            event.kind,
            _seconds(event.detect, 2),
            _seconds(event.decide, 2),
            _seconds(event.rebuild, 2),
            _seconds(event.coding_seconds, 3),
            _seconds(event.start, 1),
            _seconds(event.copy_in_seconds, 3),
            _seconds(event.iterate, 2),
        )
    return table


def _table(title: str, *columns: tuple[str, Side]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading, side in columns:
        table.add_column(heading, justify=side)
    return table


def _overhead_lines(report: Report) -> list[str]:
    cost = report.overhead
    if cost is None:
        return []
    levels = f"{cost.protected} protected" + f", {cost.local} local only" * (cost.local > 0)
    given_up = f"; {len(cost.given_up)} more given up" if cost.given_up else ""
    return [
        f"snapshots  {cost.protected + cost.local} committed ({levels}){given_up}",
        f"overhead   {cost.share:.2%} of all iteration time; a snapshot holds training for "
        f"{1000 * cost.stall_median:.1f} ms",
        f"           (worst {1000 * cost.stall_worst:.1f} ms), "
        f"{cost.stall_per_iteration:.1%} of an iteration",
        f"iteration  {1000 * cost.iteration_with:.0f} ms with snapshots, "
        f"{1000 * cost.iteration_without:.0f} ms uninterrupted; here all nodes share "
        f"{os.cpu_count()} cores",
    ]


def _memory_lines(report: Report) -> list[str]:
    holding = [node for node in report.memory if node.shards]
    if not holding:
        return []
    arena = max(node.arena_bytes for node in holding)
    smp = max(node.smp_bytes for node in report.memory)
    settings = report.settings
    return [
        f"memory     {arena / _MEBI:.1f} MiB of arenas a node: {settings.ranks_per_node} x "
        f"{report.state_bytes / _MEBI:.1f} MiB of state, 2 slots, {settings.protect}",
        f"           {smp / _MEBI:.0f} MiB for the SMP beside them",
    ]


def _version_lines(report: Report) -> list[str]:
    words = [f"{name} {value}" for name, value in report.versions.items()]
    half = (len(words) + 1) // 2
    return [f"versions   {', '.join(words[:half])},", f"           {', '.join(words[half:])}"]


def _seconds(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} s"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
