"""Write the state of the jobs on this machine as metrics in Prometheus' text format.

  megatron-ft metrics
  megatron-ft metrics --output /var/lib/node_exporter/megatron-ft.prom --every 15

The file is for node_exporter's textfile collector, and is whole at every moment: nothing here
listens on a port.  Each host reports the job, and the nodes that it has itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ft.cli import common
from megatron_ft.cli.status import collect
from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor.heartbeats import PARTS

_FAMILIES: Mapping[str, tuple[str, str]] = {
    "supervised": ("gauge", "1 while a supervisor leads the job"),
    "incarnation": ("gauge", "number of the job's present start"),
    "iteration": (
        "gauge",
        "newest iteration that is reached, committed, protected or durable, or that survives the "
        "end of trainers (crash) or of a node (node_loss)",
    ),
    "iteration_seconds": ("gauge", "usual time of an iteration of the slowest rank"),
    "encoders_up": ("gauge", "1 while snapshots become protected"),
    "paused": ("gauge", "1 while snapshots are paused by command"),
    "snapshots_skipped_total": ("counter", "snapshots that were due and not taken"),
    "snapshots_given_up": ("gauge", "the last snapshots, in a row, that were given up"),
    "drain_failures_total": ("counter", "drains to disk that failed"),
    "damaged_shards": ("gauge", "shards in memory that count as lost"),
    "recovery_seconds": ("gauge", "the last recovery in its parts"),
    "node_answers": ("gauge", "1 if the node's SMP answers"),
    "node_shards": ("gauge", "shards that the node holds; a spare has none"),
    "node_arena_bytes": ("gauge", "size of the node's arenas"),
    "node_smp_bytes": ("gauge", "resident memory of the node's SMP without arenas"),
    "scrub_passes_total": ("counter", "times that the node's scrub has read everything committed"),
    "scrub_read_bytes_total": ("counter", "bytes that the node's scrub has read"),
    "scrub_bad_blocks_total": ("counter", "damaged blocks that the node's scrub has found"),
}
"""Type and description of each metric, by its name without ``megatron_ft_``."""

Sample = tuple[str, Mapping[str, str], float]
"""Name, labels and value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft metrics``."""
    parser.add_argument("--job", default=None, help="name of the job (default: every job here)")
    common.add_argument(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there, do not print")
    parser.add_argument(
        "--every", type=float, metavar="SECONDS", help="write anew so often, until interrupted"
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the metrics of every job found; a machine without one has none."""
    path, seconds = arguments.output, arguments.every
    if seconds is not None and (path is None or not 1 <= seconds <= 3600):
        raise ConfigError("--every takes 1 to 3600 seconds, and --output FILE beside it")
    while True:
        text = metrics(collect(common.root_of(arguments), arguments.job))
        if path is None:
            print(text, end="")
        else:
            common.replace_output(path, text)
        if seconds is None:
            return 0
        time.sleep(seconds)


def metrics(jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """The text format of what ``status.collect`` found."""
    samples = [sample for name, job in jobs.items() for sample in _samples(name, job)]
    lines = []
    for name, (kind, description) in _FAMILIES.items():
        of_this = [_line(name, labels, value) for one, labels, value in samples if one == name]
        if of_this:
            lines.append(f"# HELP megatron_ft_{name} {description}")
            lines.append(f"# TYPE megatron_ft_{name} {kind}")
            lines += of_this
    return "".join(f"{line}\n" for line in lines)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"megatron_ft_{name}{{{shown}}} {value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _samples(name: str, job: Mapping[str, Any]) -> Iterator[Sample]:
    # `job` is the label that Prometheus itself gives to what it scrapes.
    whose = {"training": name}
    yield "supervised", whose, job["supervised"]
    if summary := job["summary"]:
        for one, value in _of_summary(summary):
            yield one, whose, value
        states = {
            "reached": summary["iteration"],
            **{key: (summary[key] or {}).get("iteration") for key in _STEPS},
            **{key: summary[key] for key in ("crash", "node_loss")},
        }
        for state, iteration in states.items():
            # -1 is no iteration yet, and None no snapshot.
            if iteration is not None and iteration >= 0:
                yield "iteration", {**whose, "state": state}, iteration
        recovery = summary["watch"].get("recovery") or {}
        for part in PARTS:
            if part in recovery:
                yield "recovery_seconds", {**whose, "part": part}, recovery[part]
    for node, view in job["nodes"].items():
        for one, value in _of_node(view):
            yield one, {**whose, "node": node}, value


_STEPS = ("committed", "protected", "durable")


def _of_summary(summary: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    return (
        ("incarnation", summary["incarnation"]),
        ("iteration_seconds", summary["watch"].get("iteration_seconds", 0.0)),
        ("encoders_up", summary["encoders"] == "up"),
        ("paused", summary["paused"]),
        ("snapshots_skipped_total", summary["skipped"]),
        ("snapshots_given_up", summary["given_up"]),
        ("drain_failures_total", summary["drain_failures"]),
        ("damaged_shards", summary["damaged_shards"]),
    )


def _of_node(view: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    if "error" in view:
        return (("node_answers", 0),)
    scrub = view["scrub"]
    return (
        ("node_answers", 1),
        ("node_shards", len(view["shards"])),
        ("node_arena_bytes", view["arena_bytes"]),
        ("node_smp_bytes", view["smp_bytes"]),
        ("scrub_passes_total", scrub["passes"]),
        ("scrub_read_bytes_total", scrub["bytes_read"]),
        ("scrub_bad_blocks_total", scrub["bad_blocks"]),
    )
