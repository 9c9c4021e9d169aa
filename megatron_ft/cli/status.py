"""Show what is protected, and what a node loss would cost right now."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.arena.format import SlotState
from megatron_ft.cli import common
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets

SEVERAL = 2
"""One snapshot that is given up is a hiccup; so many in a row have a cause worth a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft status``."""
    parser.add_argument("--job", default=None, help="name of the job (default: every job here)")
    common.add_argument(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the status of every job found."""
    jobs = collect(common.root_of(arguments), arguments.job)
    if not jobs:
        raise ControlPlaneError("no SMP runs here; is the job running, or --arena-dir missing?")
    if arguments.json:
        print(json.dumps(jobs, indent=1))
    else:
        print("\n\n".join(render(name, job) for name, job in jobs.items()))
    return 0


def collect(root: Path, job: str | None) -> dict[str, dict[str, Any]]:
    """Job name to its coordinator's summary and to what each node holds."""
    jobs: dict[str, dict[str, Any]] = {}
    for path in sockets(root, job):
        entry = jobs.setdefault(path.parent.parent.name, {"summary": {}, "nodes": {}})
        try:
            status = ask(path, m.StatusRequest())
        except (ControlPlaneError, UntrustedFileError) as error:
            entry["nodes"][path.parent.name] = {"error": str(error)}
            continue
        entry["nodes"][status.node] = _node(status)
        if status.summary and status.lease_seconds_left >= entry.get("_fresh", 0.0):
            entry["summary"], entry["_fresh"] = (
                json.loads(status.summary),
                status.lease_seconds_left,
            )
    for entry in jobs.values():
        entry["supervised"] = entry.pop("_fresh", 0.0) > 0
    return jobs


def _node(status: m.Status) -> dict[str, Any]:
    return {
        "pid": status.pid,
        "incarnation": status.incarnation,
        "paused": status.paused,
        "lease_seconds_left": round(status.lease_seconds_left, 1),
        "smp_bytes": status.resident_bytes,
        "scrub": msgspec.structs.asdict(status.scrub),
        "arena_bytes": sum(a.file_bytes for a in status.arenas),
        "shards": {a.shard_id: _shard(a, status.progress) for a in status.arenas},
    }


def _shard(arena: m.ArenaReport, progress: dict[str, int]) -> dict[str, Any]:
    return {
        "progress": progress.get(arena.shard_id, -1),
        "stripe": list(arena.members),
        "codec": f"{arena.codec}:{arena.data_members}+{arena.parity_members}",
        "slots": [
            {
                "state": SlotState(s.state).name,
                "snapshot": None if s.snapshot is None else str(s.snapshot),
                "iteration": s.iteration,
                "parity": s.parity_valid,
            }
            for s in arena.slots
        ],
    }


def render(name: str, job: dict[str, Any]) -> str:
    """One job as text."""
    lines = [f"job {name}: {_headline(job)}"]
    lines.append(f"{'node':10} {'shard':20} {'iteration':>9}  {'slots':44} {'arena':>9}")
    for node, view in job["nodes"].items():
        if "error" in view:
            lines.append(f"{node:10} {view['error']}")
        elif not view["shards"]:
            moved = job["summary"].get("moves", {}).get(node, {}).get("state") == "moved"
            lines.append(f"{node:10} {'(evacuated)' if moved else '(spare)':20}")
        else:
            lines += [_shard_line(node, s, v, view) for s, v in view["shards"].items()]
    summary = job["summary"]
    if summary.get("given_up", 0) >= SEVERAL:
        lines.append(
            f"the last {summary['given_up']} snapshots were given up: {summary['given_up_reason']}"
        )
    if recovery := summary.get("watch", {}).get("recovery"):
        lines.append(f"last restart: {recovery['text']}")
    lines.append(_scrub_line(job))
    return "\n".join(lines)


def _scrub_line(job: dict[str, Any]) -> str:
    """Counts of the scrubs of all nodes together."""
    views = [view["scrub"] for view in job["nodes"].values() if "scrub" in view]
    total = {name: sum(view[name] for view in views) for name in m.ScrubCounts.__struct_fields__}
    least = min((view["passes"] for view in views), default=0)
    damaged = job["summary"].get("damaged_shards", 0)
    return (
        f"scrub: {least} passes, {total['bytes_read'] / 2**30:.2f} GiB read, "
        f"{total['bad_blocks']} bad blocks found; {damaged} shards count as lost"
    )


def _headline(job: dict[str, Any]) -> str:
    summary = job["summary"]
    if not job["supervised"]:
        return "no supervisor; run the same `megatron-ft run` command again to continue"
    crash, node_loss = summary.get("crash"), summary.get("node_loss")
    if summary.get("committed") is None:
        exposed = "nothing committed yet: a failure starts over"
    elif crash is None:
        exposed = "nothing in memory survives a crash"
    elif node_loss is None:
        exposed = f"iteration {crash} survives a crash, nothing in memory survives a node loss"
    else:
        exposed = f"iteration {crash} survives a crash, iteration {node_loss} a node loss"
    if damaged := summary.get("damaged_shards"):
        exposed += f" ({damaged} shards are damaged)"
    if summary.get("durable"):
        exposed += f", iteration {summary['durable']['iteration']} is on disk"
    if summary.get("drain_failures"):
        exposed += f"; {summary['drain_failures']} drains failed: {summary['drain_failure']}"
    paused = ", snapshots paused" if summary.get("paused") else ""
    skipped = f", snapshots skipped for {summary['skipping_for']}"
    paused += skipped if summary.get("skipping_for") else ""
    if summary.get("skipped"):
        paused += f", {summary['skipped']} skipped so far"
    return (
        f"incarnation {summary['incarnation']}, iteration {summary['iteration']}, "
        f"encoders {summary['encoders']}{paused}; {exposed}"
    )


def _shard_line(node: str, shard: str, view: dict[str, Any], parent: dict[str, Any]) -> str:
    slots = "  ".join(
        s["state"] if s["iteration"] < 0 else f"{s['state']} {s['iteration']}{'+p' * s['parity']}"
        for s in view["slots"]
    )
    size = parent["arena_bytes"] / len(parent["shards"]) / 2**20
    return f"{node:10} {shard:20} {view['progress']:9}  {slots:44} {size:5.1f} MiB"
