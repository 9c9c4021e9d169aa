"""The result of a demo: as data for a program, as tables for a person.

Two runs of the same training, compared bit by bit, rank by rank.

How much memory a job's nodes hold, as their SMPs say, and which software it runs on.

What snapshots cost the training, from what the trainers reported and the traces.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ft import __version__
from megatron_ft.cli import status
from megatron_ft.cli.demo.frameworks import Framework
from megatron_ft.cli.demo.outcome import Outcome
from megatron_ft.cli.demo.settings import DemoSettings, Record
from megatron_ft.cli.demo.trace import TraceLine, final_lines, final_path, read_trace
from megatron_ft.core.errors import NoMpiError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.launchers.virtual import VirtualCluster


@dataclass
class Comparison:
    """What was compared and where it differs; ``differences`` is empty if nothing does."""

    losses: int = 0
    samples: int = 0
    tensors: int = 0
    values: int = 0
    bytes: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether there was something to compare and every bit of it is the same."""
        return not self.differences and self.tensors > 0 and self.losses > 0


def compare_runs(ours: Path, oracle: Path, world_size: int, iterations: int) -> Comparison:
    """Compare trace and final state of every rank in two trace folders.

    The last occurrence of an iteration counts; each of 1 to ``iterations`` must be there.
    """
    result = Comparison()
    for rank in range(world_size):
        traces = [final_lines(read_trace(folder, rank)) for folder in (ours, oracle)]
        compare_traces(result, rank, traces[0], traces[1], iterations)
        compare_states(result, rank, ours, oracle)
    return result


def compare_traces(
    result: Comparison,
    rank: int,
    ours: dict[int, TraceLine],
    oracle: dict[int, TraceLine],
    iterations: int,
) -> None:
    """Compare losses and sample indices of one rank; adds to ``result``."""
    for iteration in range(1, iterations + 1):
        mine, other = ours.get(iteration), oracle.get(iteration)
        where = f"rank {rank} iteration {iteration}"
        if mine is None or other is None:
            run = "our run" if mine is None else "the uninterrupted run"
            result.differences.append(f"{where}: missing in {run}")
            continue
        if mine.loss != other.loss:
            result.differences.append(
                f"{where}: loss {mine.loss_value!r}, uninterrupted {other.loss_value!r}"
            )
        if mine.samples != other.samples:
            result.differences.append(
                f"{where}: samples {mine.samples}, uninterrupted {other.samples}"
            )
        result.losses += mine.loss is not None
        result.samples += len(mine.samples)


def compare_states(result: Comparison, rank: int, ours: Path, oracle: Path) -> None:
    """Compare all that one rank held at the end; adds to ``result``."""
    import torch

    from megatron_ft.cli.demo import final_state

    missing = [p for p in (final_path(f, rank) for f in (ours, oracle)) if not p.exists()]
    if missing:
        result.differences += [f"rank {rank}: no final state at {path}" for path in missing]
        return
    mine, other = (torch.load(final_path(f, rank), weights_only=True) for f in (ours, oracle))
    found = final_state.differences(mine, other)
    result.differences += [f"rank {rank}: final state differs at {path}" for path in found]
    for leaf in _leaves(mine):
        if isinstance(leaf, torch.Tensor):
            result.tensors += 1
            result.bytes += leaf.numel() * leaf.element_size()
        else:
            result.values += 1


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


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
    """What snapshots cost.  Seconds; a snapshot's stall is that of its slowest rank.

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
    """Median time of an iteration, each incarnation's first one left out where others are there."""
    later = [b.seconds for a, b in zip(lines, lines[1:], strict=False) if _same_incarnation(a, b)]
    return median(later or [line.seconds for line in lines])


def _same_incarnation(one: TraceLine, other: TraceLine) -> bool:
    return one.incarnation == other.incarnation


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
