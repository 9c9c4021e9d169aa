"""Check every byte of a checkpoint on disk, or of a job's snapshots in memory.

  megatron-ft verify DIR | --job NAME

DIR is one checkpoint that was drained, or a folder with several.  Nothing is changed.  The job may
run meanwhile; snapshots that need the memory that is read are skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.drained import open_checkpoint
from megatron_ft.checkpoint.source import SnapshotInfo, SnapshotSource
from megatron_ft.cli import common
from megatron_ft.core.errors import SnapshotUnavailableError

EXIT_CODES: Mapping[int, str] = {
    3: "something is damaged or incomplete, but a whole snapshot is there",
    4: "there is no whole snapshot",
}

MOST_LOOKS = 5
"""Most looks at a job that gives up snapshots faster than they are opened."""
LOOK_SECONDS = 0.2
"""Pause before the next look at a problem, long enough for headers that are being written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="on disk")
    which.add_argument("--job", help="in the memory of this job")
    common.add_folders(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(arguments: argparse.Namespace) -> int:
    if arguments.directory is not None:
        found = check(open_checkpoint(arguments.directory))
    else:
        found = check(common.open_memory(arguments))
    print(json.dumps(found, indent=1) if arguments.json else render(found))
    if not any(not entry["problem"] for entry in found["snapshots"]):
        return 4
    damaged = found["problems"] or any(entry["problem"] for entry in found["snapshots"])
    return 3 if damaged else 0


def check(source: SnapshotSource) -> dict[str, Any]:
    """Each snapshot of the source with what is wrong with it, and what else is wrong.

    A job that runs gives snapshots up for newer ones.  One that is not listed any more is not
    damaged.  A problem counts if two looks have shown it: one may fall between two headers.
    """
    infos, problems = source.snapshots(), set(source.problems)
    entries = [_checked(source, info) for info in infos]
    for _ in range(MOST_LOOKS):
        there = {str(info.snapshot) for info in source.snapshots()}
        gone = {e["snapshot"] for e in entries if e["problem"] and e["snapshot"] not in there}
        problems &= set(source.problems)
        entries = [entry for entry in entries if entry["snapshot"] not in gone]
        if not gone and not problems:
            break
        if gone and not any(not entry["problem"] for entry in entries):
            known = {entry["snapshot"] for entry in entries}
            new = [info for info in source.snapshots() if str(info.snapshot) not in known]
            entries = [*(_checked(source, info) for info in new), *entries]
        elif problems:
            time.sleep(LOOK_SECONDS)
    listed = sorted(problems, key=list(source.problems).index)
    return {"source": str(source), "snapshots": entries, "problems": listed}


def _checked(source: SnapshotSource, info: SnapshotInfo) -> dict[str, Any]:
    entry = {"snapshot": str(info.snapshot), "iteration": info.iteration, "level": info.level}
    try:
        with source.open(info) as shards:
            used = sum(shard.record.used_bytes for shard in shards.values())
            return entry | {"shards": len(shards), "bytes": used, "problem": ""}
    except SnapshotUnavailableError as error:
        return entry | {"shards": 0, "bytes": 0, "problem": str(error)}


def render(found: dict[str, Any]) -> str:
    lines = [found["source"]]
    for entry in found["snapshots"]:
        what = f"iteration {entry['iteration']}, snapshot {entry['snapshot']} ({entry['level']})"
        whole = f"whole: {entry['shards']} shards, {entry['bytes'] / (1 << 20):.1f} MiB"
        lines.append(f"  {what}: {entry['problem'] or whole}")
    lines += [f"  {problem}" for problem in found["problems"]]
    if not found["snapshots"]:
        lines.append("  no complete snapshot")
    return "\n".join(lines)
