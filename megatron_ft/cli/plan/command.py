"""Forecast, before training, the memory, traffic, survival, interval, spares and ETTR of a job.

  megatron-ft plan --parameters 70e9 --nodes 64 --host-memory-gib 1024 --iteration-seconds 10
  megatron-ft plan --shard-gib 2 --nodes 8 --host-memory-gib 256 --iteration-seconds 4 --job NAME

Without --protect the usual schemes are compared, and of those that fit the best is described.
A rank's state is parameters x (precision + optimizer) / ranks, in bytes a parameter:
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

from megatron_ft.cli.plan import sources
from megatron_ft.cli.plan.model import Forecast, PlannedJob, candidates, check, recommend
from megatron_ft.cli.plan.simulate import SimulatedRun, monte_carlo, simulate
from megatron_ft.config import SETTINGS
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme

GIB = 1 << 30
MOST_STRIKES = 400_000
"""Failures that are simulated at most: some seconds of work."""

PRECISIONS: Mapping[str, int] = {"bf16": 4, "fp16": 4, "fp32": 4, "bf16-only": 2}
"""Bytes of a parameter: an fp32 master, from which the weights follow, or the weights alone."""

OPTIMIZERS: Mapping[str, int] = {"adam": 8, "adam-bf16": 4, "adam-8bit": 2, "momentum": 4, "sgd": 0}
"""Bytes of a parameter: two moments of fp32, bf16 or 8 bits, one moment, or none."""

__doc__ += f"  precision  {PRECISIONS}\n  optimizer  {OPTIMIZERS}\n".replace("'", "")

_CORE = "measured on one core, 2026-11"
_RATES = {
    "copy-gib-s": (2.22, f"copy of a rank's state into its arena; {_CORE}"),
    "digest-gib-s": (2.48, f"digests of a rank; {_CORE}"),
    "encode-gib-s": (2.2, f"coding of a node for one member of parity; {_CORE}"),
    "link-gib-s": (11.6, "link of a node, each way; assumed, 100 Gbit/s"),
    "detect-seconds": (30.0, "until a lost node is known; assumed"),
    "restart-seconds": (None, "start of trainers after a failure; of --job, else 60 is assumed"),
    "replacement-hours": (24.0, "until a lost node's replacement is a spare; assumed"),
    "drain-seconds": (3600.0, "between two checkpoints that are drained to disk; assumed"),
    "run-hours": (720.0, "length of the run"),
}
_COUNTS = {
    "ranks-per-node": (1, 8, "ranks of each node"),
    "slots": (2, 2, "snapshots kept of each shard; 3 with drains where memory allows"),
    "nodes-per-domain": (1, 1, "nodes that fail together, at most"),
    "spares": (0, None, "spare nodes; as many as are recommended, if not given"),
    "runs": (2, 1000, "random runs that are simulated, at most"),
    "seed": (0, 0, "of the random runs"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, _number(float, 0, above=True)
    size = parser.add_mutually_exclusive_group(required=True).add_argument
    size("--parameters", type=positive, help="parameters of the model, for example 70e9")
    size("--shard-gib", type=positive, help="state of one rank instead, as `status` shows it")
    add("--precision", choices=PRECISIONS, default="bf16")
    add("--optimizer", choices=OPTIMIZERS, default="adam")
    add("--nodes", type=_number(int, 1), required=True, help="nodes that train")
    memory = "host memory of a node that arenas may take (a tmpfs: its size)"
    add("--host-memory-gib", type=positive, required=True, help=memory)
    add("--iteration-seconds", type=positive, required=True, help="duration of an iteration")
    add("--protect", help="the scheme, as of `megatron-ft run`")
    for name, (least, count, text) in _COUNTS.items():
        shown = "" if count is None else f" (default: {count})"
        add(f"--{name}", type=_number(int, least), default=count, help=text + shown)
    for name, (default, text) in _RATES.items():
        shown = "" if default is None else f" (default: {default:g})"
        add(f"--{name}", type=positive, default=default, help=text + shown)
    known = parser.add_mutually_exclusive_group().add_argument
    known("--mtbf-hours", type=positive, help="time between failures of the job")
    known("--job", help="the same from the ledger of a job of this name")
    known(
        "--trace", type=Path, help="the same from a file of lines `hours,node`; simulated as well"
    )
    known("--sacct", type=Path, help=f"the same from the output of `{sources.SACCT}`; - is stdin")
    add("--state-dir", type=Path, help="the --state-dir of that job, if it has one")
    share = "share of failures that lose a node's memory (default: what is known, else 1)"
    add("--node-share", type=_number(float, 0, 1), help=share)
    add("--json", action="store_true", help="print everything as JSON")


def _number(
    kind: Callable[[str], float], least: float, most: float = math.inf, above: bool = False
) -> Callable[[str], float]:
    """A converter for argparse, which says the nearest number that is possible."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or (above and value == least) or math.isinf(value):
            nearest = "above 0" if above else f"{least:g}" if value < least else f"{most:g}"
            raise argparse.ArgumentTypeError(f"{text}: the nearest possible is {nearest}")
        return value

    return number


class Report(NamedTuple):
    """The forecast of a job: its scheme, simulated runs, and the ETTR on the trace."""

    history: sources.History
    chosen: Forecast
    simulated: list[SimulatedRun]
    trace: float | None


def main(arguments: argparse.Namespace) -> int:
    """Print the plan; ConfigError, which names the flag, for what is impossible."""
    report = make_report(arguments)
    print(json.dumps(as_dict(report), indent=1) if arguments.json else "\n".join(lines(report)))
    return 0


def make_report(arguments: argparse.Namespace) -> Report:
    """The forecast of the scheme that was asked for, or of the best one that fits."""
    history = _history(arguments)
    job = planned_job(arguments, history)
    best = None if arguments.protect else recommend(candidates(job))
    chosen = best or check(job, Scheme.parse(arguments.protect or "none"))
    longest = chosen.work + chosen.safe_seconds
    if job.mtbf < longest:
        raise ConfigError(
            f"--mtbf-hours {job.mtbf / 3600:.3g}: the job fails before a snapshot is safe; the "
            f"least possible is {longest / 3600:.3g}"
        )
    runs = max(2, min(arguments.runs, int(MOST_STRIKES * job.mtbf / job.run)))
    simulated, trace = monte_carlo(chosen, runs, arguments.seed), None
    if history.strikes:
        whole = replace(chosen, job=replace(job, run=history.strikes[-1].at))
        trace = simulate(whole, history.strikes).ettr
    return Report(history, chosen, simulated, trace)


def _history(arguments: argparse.Namespace) -> sources.History:
    nodes, share = arguments.nodes, arguments.node_share
    if arguments.mtbf_hours:
        found = sources.History("--mtbf-hours", 3600 * arguments.mtbf_hours)
    elif arguments.job:
        found = sources.of_job(arguments.job, arguments.state_dir)
    elif arguments.trace:
        found = sources.of_trace(arguments.trace, nodes)
    elif arguments.sacct:
        found = sources.of_sacct(arguments.sacct, nodes)
    else:
        found = sources.published(nodes * arguments.ranks_per_node)
    return found if share is None else found._replace(node_share=share)


def planned_job(given: argparse.Namespace, history: sources.History) -> PlannedJob:
    each = PRECISIONS[given.precision] + OPTIMIZERS[given.optimizer]
    ranks = given.nodes * given.ranks_per_node
    size = GIB * given.shard_gib if given.shard_gib else each * given.parameters / ranks
    return PlannedJob(
        shard_bytes=math.ceil(size),
        nodes=given.nodes,
        ranks_per_node=given.ranks_per_node,
        host_bytes=GIB * given.host_memory_gib,
        iteration=given.iteration_seconds,
        mtbf=history.mtbf,
        node_share=history.node_share,
        copy=GIB * given.copy_gib_s,
        digest=GIB * given.digest_gib_s,
        encode=GIB * given.encode_gib_s,
        link=GIB * given.link_gib_s,
        slots=given.slots,
        nodes_per_domain=given.nodes_per_domain,
        detect=given.detect_seconds,
        restart=given.restart_seconds or history.restart or 60.0,
        replacement=3600 * given.replacement_hours,
        spares=-1 if given.spares is None else given.spares,
        drain=given.drain_seconds,
        budget=SETTINGS["overhead_percent"].default / 100,
        run=3600 * given.run_hours,
    )


_ROW = ("node_bytes", "fits", "encode_bytes", "safe_seconds", "survival", "ettr")
_MORE = ("set_sizes", "copy_seconds", "cost_seconds", "rebuild_bytes", "repair_seconds",
         "interval", "spares", "spare_missing")  # fmt: skip


def as_dict(report: Report) -> dict[str, Any]:
    """The plan for programs: bytes and seconds."""
    one, ettrs = report.chosen, [run.ettr for run in report.simulated]

    def row(each: Forecast, *names: str) -> dict[str, Any]:
        return {"scheme": str(each.scheme), **{name: getattr(each, name) for name in names}}

    cuts = quantiles(ettrs, n=20)
    return {
        "failures": report.history.source,
        "mtbf": one.job.mtbf,
        "node_share": one.job.node_share,
        "shard_bytes": one.job.shard_bytes,
        "schemes": [row(each, *_ROW) for each in candidates(one.job)],
        **row(one, *_ROW, *_MORE),
        "survival_simulated": mean(not run.from_disk for run in report.simulated),
        "ettr_simulated": mean(ettrs),
        "ettr_range": [cuts[0], cuts[-1]],
        "ettr_on_trace": report.trace,
    }


def lines(report: Report) -> Iterator[str]:
    one, job, found = report.chosen, report.chosen.job, as_dict(report)
    yield (
        f"{_gib(job.shard_bytes)} of state a rank, {job.ranks_per_node} ranks on each of "
        f"{job.nodes} nodes; a failure every {job.mtbf / 3600:.3g} h, of which "
        f"{job.node_share:.0%} lose a node:\n{report.history.source}"
    )
    yield "scheme       GiB a node  GiB a link  s to safe  saved by memory      ETTR"
    for row in found["schemes"]:
        yield (
            f"{row['scheme']:<12} {row['node_bytes'] / GIB:10.2f} {row['encode_bytes'] / GIB:11.2f}"
            f" {row['safe_seconds']:10.1f} {row['survival']:16.3%} {row['ettr']:9.3%}"
            f"{'' if row['fits'] else '  does not fit'}"
        )
    yield f"{one.scheme}:"
    yield from (f"  {text}" for text in _details(report, found))
    least = max(1.0, one.safe_seconds / job.iteration)
    yield "  time that is not productive, by iterations between snapshots:"
    shown = [n for n in (one.interval * 4**i // 4 for i in range(5)) if n >= least]
    lost = {n: 1 - replace(one, iterations=n).ettr for n in shown}
    for n, share in lost.items():
        yield f"  {n:>9} {'#' * round(40 * share / max(lost.values())):<40} {share:.3%}"


def _details(report: Report, found: Mapping[str, Any]) -> Iterator[str]:
    one, job, sizes = report.chosen, report.chosen.job, report.chosen.set_sizes
    lost, most = one.scheme.parity_members, " to ".join(map(str, sorted({*sizes})))
    domain = ", and a domain" if job.nodes_per_domain > 1 else ""
    nodes = f"the loss of {lost} of {most} nodes at once in each of {len(sizes)} sets{domain}"
    yield f"memory    {_gib(one.node_bytes)} for arenas on each node and each spare"
    yield (
        f"snapshot  copied in {one.copy_seconds:.2f} s, committed after {one.safe_seconds:.1f} s, "
        f"{_gib(one.encode_bytes)} each way over a node's link; costs {one.cost_seconds:.3f} s"
    )
    yield f"survives  {nodes if lost else 'crashes of trainers, but no loss of a node'}"
    if lost:
        yield (
            f"repair    memory is whole {one.repair_seconds:.0f} s after a node's loss; its spare "
            f"receives {_gib(one.rebuild_bytes)}"
        )
    yield (
        f"saved     {one.survival:.3%} of runs of {job.run / 3600:.4g} h by memory alone; of "
        f"{len(report.simulated)} that were simulated {found['survival_simulated']:.3%}"
    )
    yield f"interval  {one.interval} iterations, {one.work:.1f} s"
    if job.node_share:
        yield f"spares    {one.spares}; {one.spare_missing:.2%} of node losses find none"
    low, high = found["ettr_range"]
    yield (
        f"ETTR      {one.ettr:.3%} expected; simulated {found['ettr_simulated']:.3%}, 90 % of runs "
        f"between {low:.3%} and {high:.3%}"
    )
    if report.trace is not None:
        yield f"trace     ETTR {report.trace:.3%} when the trace is simulated"


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"
