"""Show what is protected, and what the loss of any node, or any two, would cost right now.

SMPs of this machine say what their nodes hold.  The rest is what the job's supervisor last wrote to
the state folder, on a login node too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.arena.format import SlotState
from megatron_ft.cli import common
from megatron_ft.core import private_files
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets
from megatron_ft.supervisor.exposure import redone
from megatron_ft.supervisor.job_state import STATUS, state_folder

FRESH_SECONDS = 15.0
"""A supervisor that runs has written its status since; clocks of machines differ somewhat."""
MOST_NAMES = 8
SEVERAL = 2
"""One snapshot that is given up is a hiccup; this many in a row have a cause worth a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", default=None, help="name of the job (default: every job here)")
    common.add_folders(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(arguments: argparse.Namespace) -> int:
    jobs = collect(common.root_of(arguments), arguments.job)
    for name, entry in recorded(arguments.job, arguments.state_dir):
        known = jobs.setdefault(name, entry)
        if not known["summary"]:
            supervised = known["supervised"] or entry["supervised"]
            jobs[name] = {**entry, "nodes": known["nodes"], "supervised": supervised}
    if not jobs:
        raise ControlPlaneError(
            "no SMP runs here, and no supervisor has left a status; is the job running, or "
            "--job, --arena-dir or --state-dir missing?"
        )
    for entry in jobs.values():
        entry["exposure"] = exposure(entry["summary"])
    if arguments.json:
        print(json.dumps(jobs, indent=1))
    else:
        print("\n\n".join(render(name, job) for name, job in jobs.items()))
    return 0


def collect(root: Path, job: str | None) -> dict[str, dict[str, Any]]:
    """Job name to what each node holds, and to the status that its SMPs know a file of."""
    jobs: dict[str, dict[str, Any]] = {}
    for path in sockets(root, job):
        entry = jobs.setdefault(
            path.parent.parent.name, {"summary": {}, "nodes": {}, "supervised": False}
        )
        try:
            status = ask(path, m.StatusRequest())
        except (ControlPlaneError, UntrustedFileError) as error:
            entry["nodes"][path.parent.name] = {"error": str(error)}
            continue
        entry["nodes"][status.node] = _node(status)
        entry["supervised"] = entry["supervised"] or status.lease_seconds_left > 0
        if "file" not in entry:
            with suppress(OSError, ValueError, KeyError, UntrustedFileError):
                found = written(Path(status.status_file))
                entry |= {**found, "supervised": entry["supervised"] or found["supervised"]}
    return jobs


def written(path: Path) -> dict[str, Any]:
    """The status in a file, its ``age`` in seconds, and if the job was ``supervised`` until now.

    Raises OSError or UntrustedFileError as private_files does, ValueError or KeyError for others.
    """
    found: dict[str, Any] = json.loads(private_files.read_file(path))
    age = round(time.time() - found["time"], 1)
    supervised = age < FRESH_SECONDS and not found.get("ended")
    return {**found, "file": str(path), "age": age, "supervised": supervised}


def recorded(job: str | None, state_dir: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """As ``collect``, without nodes: of ``job``, or of all jobs that run."""
    notes = state_folder(job or "any", state_dir)
    for path in [notes / STATUS] if job else sorted(notes.parent.glob(f"*/{STATUS}")):
        with suppress(OSError, ValueError, *(() if job else (UntrustedFileError,))):
            found = written(path)
            if job or found["supervised"]:
                yield path.parent.name, {**found, "nodes": {}}


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
    lines = [f"job {name}: {_headline(job)}"]
    if job["nodes"]:
        lines.append(f"{'node':10} {'shard':20} {'iteration':>9}  {'slots':44} {'arena':>9}")
    for node, view in job["nodes"].items():
        if "error" in view:
            lines.append(f"{node:10} {view['error']}")
        elif not view["shards"]:
            lines.append(f"{node:10} {_without_shard(node, job['summary']):20}")
        else:
            lines += [_shard_line(node, s, v, view) for s, v in view["shards"].items()]
    summary = job["summary"]
    if "file" in job and not (job["nodes"] and job["supervised"]):
        where = "" if job["nodes"] else "no SMP of it answers here; "
        lines.append(f"{where}its supervisor wrote this {job['age']:.0f} s ago")
    lines += _exposure_lines(summary)
    if late := summary.get("unregistered"):
        lines.append(late)
    if summary.get("given_up", 0) >= SEVERAL:
        lines.append(
            f"the last {summary['given_up']} snapshots were given up: {summary['given_up_reason']}"
        )
    lines += summary.get("watch", {}).get("stragglers", ())
    if recovery := summary.get("watch", {}).get("recovery"):
        lines.append(f"last restart: {recovery['text']}")
    if job["nodes"]:
        lines.append(_scrub_line(job))
    return "\n".join(lines)


def _without_shard(node: str, summary: dict[str, Any]) -> str:
    if summary.get("moves", {}).get(node, {}).get("state") == "moved":
        return "(evacuated)"
    return "(spare)" if node in summary.get("idle", [node]) else "(no shard yet)"


def exposure(summary: dict[str, Any]) -> dict[str, Any]:
    """Costs of losses: of each node that trains, and of the pairs that cost more than either.

    {} while nothing trains.
    """
    if "any_node" not in summary:
        return {}
    named = {node: one for one in summary["some_nodes"] for node in one["nodes"]}
    training = sorted({*summary["nodes"], *named} - set(summary["idle"]))
    return {
        "nodes": {node: _cost(summary, named.get(node, summary["any_node"])) for node in training},
        "pairs": [
            {**_cost(summary, one), "nodes": one["nodes"], "others": one["others"]}
            for one in summary["pairs"]
        ],
        "more_pairs": summary["more_pairs"],
        "spares": summary["spares"],
    }


def _cost(summary: dict[str, Any], fallback: dict[str, Any]) -> dict[str, Any]:
    """A fallback with the iterations that are made again; seconds are None if not measured."""
    source, iteration, watch = fallback["source"], fallback["iteration"], summary["watch"]
    lost = redone(summary["iteration"], iteration)
    each = watch.get("iteration_seconds") or None
    return {
        "source": source,
        "iteration": iteration,
        "lost_iterations": lost,
        "lost_seconds": None if each is None else round(lost * each, 3),
        "restart_seconds": watch.get("restarts", {}).get({"memory": "parity"}.get(source, source)),
    }


def _exposure_lines(summary: dict[str, Any]) -> Iterator[str]:
    costs = exposure(summary)
    if not costs:
        return
    for one in summary["some_nodes"]:
        yield f"losing {_names(one['nodes'], 'or')}: {describe(_cost(summary, one))}"
    which = "any other node" if summary["some_nodes"] else "any one node"
    yield f"losing {which}: {describe(_cost(summary, summary['any_node']))}"
    for one in costs["pairs"]:
        nodes, others = one["nodes"], one["others"]
        pair = f"any two of {_names(nodes)}" if len(nodes) > 2 else " with ".join(nodes)
        pair = f"{_names(nodes, 'or')} with {_names(others, 'or')}" if others else pair
        yield f"losing {pair}: {describe(one)}"
    if costs["more_pairs"]:
        yield f"and {costs['more_pairs']} more groups of nodes, two of which cost as much"
    yield f"free spares: {_names(costs['spares']) or 'none, a lost node cannot be replaced'}"


def describe(cost: dict[str, Any]) -> str:
    if not cost["source"]:
        return "nothing that this job keeps; at most a checkpoint of the framework's own"
    disk = "disk, " if cost["source"] == "disk" else ""
    text = f"{disk}iteration {cost['iteration']} ({cost['lost_iterations']} iterations"
    again, restart = cost["lost_seconds"], cost["restart_seconds"]
    if again is not None:
        text += f", about {again + (restart or 0.0):.1f} s" + " and a restart" * (restart is None)
    return text + ")"


def _names(nodes: Sequence[str], word: str = "and") -> str:
    shown = list(nodes[:MOST_NAMES])
    if len(nodes) > MOST_NAMES:
        shown[-1:] = [f"{len(nodes) - MOST_NAMES + 1} more"]
    return f" {word} ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _scrub_line(job: dict[str, Any]) -> str:
    """Counts of the scrubs of all nodes together."""
    views = [view["scrub"] for view in job["nodes"].values() if "scrub" in view]
    total = {name: sum(view[name] for view in views) for name in m.ScrubCounts.__struct_fields__}
    # A node without a shard, as a spare, has nothing to read and counts no pass.
    holding = [view for view in job["nodes"].values() if view.get("shards") and "scrub" in view]
    least = min((view["scrub"]["passes"] for view in holding), default=0)
    damaged = job["summary"].get("damaged_shards", 0)
    return (
        f"scrub: {least} passes, {total['bytes_read'] / 2**30:.2f} GiB read, "
        f"{total['bad_blocks']} bad blocks found; {damaged} shards count as lost"
    )


def _headline(job: dict[str, Any]) -> str:
    summary = job["summary"]
    if not job["supervised"]:
        return "no supervisor; run the same `megatron-ft run` command again to continue"
    if not summary:
        return "a supervisor leads it, whose status cannot be read: give its --state-dir"
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
    skipped = f", snapshots skipped: {summary['skipping_for']}"
    paused += skipped if summary.get("skipping_for") else ""
    if until := summary.get("waits_until"):
        paused += f", no snapshot before iteration {until} (late iterations)"
    if summary.get("skipped"):
        paused += f", {summary['skipped']} skipped so far"
    iteration = "none" if summary["iteration"] < 0 else summary["iteration"]
    return (
        f"incarnation {summary['incarnation']}, iteration {iteration}, "
        f"encoders {summary['encoders']}{paused}; {exposed}"
    )


def _shard_line(node: str, shard: str, view: dict[str, Any], parent: dict[str, Any]) -> str:
    slots = "  ".join(
        s["state"] if s["iteration"] < 0 else f"{s['state']} {s['iteration']}{'+p' * s['parity']}"
        for s in view["slots"]
    )
    size = parent["arena_bytes"] / len(parent["shards"]) / 2**20
    return f"{node:10} {shard:20} {view['progress']:9}  {slots:44} {size:5.1f} MiB"
