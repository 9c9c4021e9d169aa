"""Show who stopped first in a failure of a job, and why.

Reads the evidence in the job's state folder; the job may still run, or have ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_ft.cli.common import add_job
from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor.autopsy import CLASSES, HOW
from megatron_ft.supervisor.evidence import FOLDER, Kept, numbers_in, read_kept
from megatron_ft.supervisor.job_state import state_folder

_LAST_EVENTS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", nargs="?", type=int, help="of the failure (default: the newest)")
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="print verdict and evidence as JSON")


def main(arguments: argparse.Namespace) -> int:
    folder = state_folder(arguments.job, arguments.state_dir) / FOLDER
    known = numbers_in(folder)
    number = known[-1] if arguments.number is None and known else arguments.number
    if number not in known:
        there = f"those kept are {', '.join(map(str, known))}" if known else "it keeps none"
        raise ConfigError(
            f"{folder} has no failure{'' if number is None else f' {number}'}: {there}; name the "
            "job (--job), and the folder of its notes if it has one (--state-dir)"
        )
    found = folder / f"{number:03d}"
    kept = read_kept(found)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(kept)).decode())
    else:
        print("\n".join(page(kept, found)))
    return 0


def page(kept: Kept, folder: Path) -> Iterator[str]:
    verdict, evidence = kept.verdict, kept.evidence
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(evidence.time))
    yield f"failure {folder.name} at {moment}, in incarnation {evidence.incarnation}"
    rank = f"rank {verdict.rank}" if verdict.rank >= 0 else "no single rank is known"
    yield f"stopped first: {rank}{f' on {verdict.node}' if verdict.node else ''}"
    how = f"; {verdict.how}: {HOW.get(verdict.how, '')}" if verdict.how else ""
    yield f"class:         {verdict.kind} ({CLASSES.get(verdict.kind, '')}{how})"
    yield f"evidence:      {verdict.sentence}"
    yield f"supervisor:    {evidence.failure}"
    yield "the others:"
    yield from (f"  {line}" for line in verdict.waiting or ("there were none",))
    yield "events before:"
    yield from (f"  {line.splitlines()[0]}" for line in evidence.events[-_LAST_EVENTS:])
    yield "versions:      " + ", ".join(f"{k} {v}" for k, v in evidence.versions.items())
    yield f"all evidence:  {folder}"
