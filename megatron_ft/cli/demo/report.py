"""The result of a demo: costs, memory and versions as data, and everything as tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ft import __version__
from megatron_ft.cli import status
from megatron_ft.cli.chaos.follow import RecordedEvent
from megatron_ft.cli.chaos.trace import TraceLine
from megatron_ft.cli.demo.faults import DemoRecovery
from megatron_ft.cli.demo.settings import DemoSettings, Framework
from megatron_ft.core.errors import NoMpiError
from megatron_ft.launchers.virtual import VirtualCluster

if TYPE_CHECKING:
    from megatron_ft.cli.demo.final_state import Comparison

_PACKAGES = ("torch", "numpy", "mpi4py", "pyeclib", "pyzmq")


@dataclass(frozen=True)
class NodeMemory:
    """Bytes on one node: its arenas, and its SMP beside them; 0 shards mean a spare."""

    node: str
    shards: int
    arena_bytes: int
    smp_bytes: int


def node_memory(cluster: VirtualCluster) -> list[NodeMemory]:
    """Ask every SMP of the job; nodes that do not answer are left out.  Blocks for a moment."""
    jobs = status.collect(cluster.root, cluster.job)
    nodes: Mapping[str, Any] = jobs.get(cluster.job, {}).get("nodes", {})
    return [
        NodeMemory(name, len(view["shards"]), view["arena_bytes"], view["smp_bytes"])
        for name, view in sorted(nodes.items())
        if "error" not in view
    ]


def versions(cluster: VirtualCluster, framework: Framework) -> dict[str, str]:
    """Names and versions of what the demo ran on; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "megatron-ft": __version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {**found, **framework.versions(), "mpi": _mpi_of(cluster)}


def _mpi_of(cluster: VirtualCluster) -> str:
    try:
        mpi = cluster.mpi()
    except NoMpiError:
        return "none, encoders use TCP"
    return f"{mpi.kind.value} {mpi.version}"


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Cost of snapshots in seconds; a snapshot's stall is that of its slowest rank.

    ``share`` is all stalls over the time of all iterations; ``stall_per_iteration`` the
    median stall over the median iteration.  Median iteration times leave out the first
    iteration of each incarnation; on few cores they also hold what SMPs and encoders take.
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


def overhead(
    events: Sequence[RecordedEvent], ours: Sequence[TraceLine], oracle: Sequence[TraceLine]
) -> Overhead:
    """The cost of snapshots, from one rank's lines of both runs; both must hold iterations."""
    stalls: dict[str, float] = {}
    for cost in (e for e in events if e["kind"] == "capture_cost"):
        stalls[cost["snapshot"]] = max(cost["stall_seconds"], stalls.get(cost["snapshot"], 0.0))
    levels = [e["level"] for e in events if e["kind"] == "committed"]
    with_snapshots, without = _median_seconds(ours), _median_seconds(oracle)
    stall = median(stalls.values()) if stalls else 0.0
    return Overhead(
        snapshots=len(stalls),
        protected=levels.count("protected"),
        local=levels.count("local"),
        given_up=tuple(e["text"] for e in events if e["kind"] == "aborted"),
        stall_median=stall,
        stall_worst=max(stalls.values(), default=0.0),
        share=sum(stalls.values()) / sum(line.seconds for line in ours),
        stall_per_iteration=stall / with_snapshots,
        iteration_with=with_snapshots,
        iteration_without=without,
    )


def _median_seconds(lines: Sequence[TraceLine]) -> float:
    """Median time of an iteration, each incarnation's first one left out where others are there."""
    pairs = zip(lines, lines[1:], strict=False)
    later = [after.seconds for before, after in pairs if before.incarnation == after.incarnation]
    return median(later or [line.seconds for line in lines])


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
    overhead: Overhead | None = None
    memory: list[NodeMemory] = field(default_factory=list)
    state_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """True if both runs were compared and do not differ in a bit."""
        return self.comparison is not None and self.comparison.identical

    def as_json(self) -> dict[str, Any]:
        """The whole report as plain values."""
        framework = self.settings.framework
        return {
            "identical": self.identical,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 1),
            "settings": {
                **{f.name: getattr(self.settings, f.name) for f in fields(self.settings)},
                "framework": {"name": framework.name, **framework.choices()},
            },
            "events": [asdict(event) for event in self.recoveries],
            "comparison": self.comparison and asdict(self.comparison),
            "overhead": self.overhead and asdict(self.overhead),
            "memory": {
                "largest_shard_state_bytes": self.state_bytes,
                "nodes": [asdict(node) for node in self.memory],
            },
            "versions": self.versions,
        }


def show(report: DemoReport, console: Console) -> None:
    """Print the report; the verdict is the caller's last line."""
    console.print()
    if report.recoveries:
        console.print(_event_table(report.recoveries))
    if any(event.restored_iteration is not None for event in report.recoveries):
        console.print(_parts_table(report.recoveries))
    for line in (*_overhead_lines(report), *_memory_lines(report), *_version_lines(report)):
        console.print(Text(line))
    console.print()
    console.print(verdict(report), soft_wrap=True)


def verdict(report: DemoReport) -> Text:
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


def _event_table(events: Iterable[DemoRecovery]) -> Table:
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
    headings = (
        "killed",
        "in\niteration",
        "noticed\nafter",
        "restored\nfrom",
        "back to\niteration",
        "iterations\nlost",
        "training\nagain after",
    )
    return _table("Faults and recoveries", headings, rows, left=("killed", "restored\nfrom"))


def _parts_table(events: Iterable[DemoRecovery]) -> Table:
    rows = [
        (
            event.kind,
            _seconds(event.detect, 2),
            _seconds(event.decide, 2),
            _seconds(event.rebuild, 2),
            _seconds(event.coding_seconds, 3),
            _seconds(event.start, 1),
            _seconds(event.copy_in_seconds, 3),
            _seconds(event.iterate, 2),
        )
        for event in events
    ]
    headings = (
        "killed",
        "notice",
        "fence,\ndecide",
        "rebuild",
        "of it,\ncoding",
        "start of\ntrainers",
        "of it,\ncopy in",
        "first\niteration",
    )
    return _table("Where that time went", headings, rows, left=("killed",))


def _table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]
) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _overhead_lines(report: DemoReport) -> list[str]:
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


def _memory_lines(report: DemoReport) -> list[str]:
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


def _version_lines(report: DemoReport) -> list[str]:
    words = [f"{name} {value}" for name, value in report.versions.items()]
    half = (len(words) + 1) // 2
    return [f"versions   {', '.join(words[:half])},", f"           {', '.join(words[half:])}"]


def _seconds(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} s"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
