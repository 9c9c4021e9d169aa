"""Give up what a job has done since an iteration, and resume from the newest snapshot before it.

  megatron-ft rewind --job NAME --before-iteration N

A running job is stopped and started again from there at once; a stopped one does so when it
is run again.  What is given up is never restored again, from memory or from disk.  How far back
memory reaches depends on --slots; `megatron-ft status` shows what it holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.drained import DiskCriteria, choose, find
from megatron_ft.checkpoint.live import node_folders
from megatron_ft.checkpoint.native import iteration_of, newest_checkpoint
from megatron_ft.cli import common
from megatron_ft.cli.status import collect
from megatron_ft.core.errors import ConfigError, ControlPlaneError, SnapshotUnavailableError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets
from megatron_ft.smp.store import SUFFIX
from megatron_ft.supervisor.job_state import (
    JobHeldError,
    JobRecord,
    JobState,
    read_record,
    state_folder,
)

EXIT_CODES: Mapping[int, str] = {3: "the job got the request, but did not restart in time"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft rewind``."""
    parser.add_argument("--job", default="job", help="name of the job (default: %(default)s)")
    parser.add_argument(
        "--before-iteration", type=int, required=True, metavar="N", help="the first to give up"
    )
    parser.add_argument(
        "--from-disk",
        action="store_true",
        help="also if memory holds nothing so old: a checkpoint on disk must serve then",
    )
    common.add_folders(parser)
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds to wait for the start (%(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Rewind; see EXIT_CODES."""
    root, before = common.root_of(arguments), arguments.before_iteration
    if before < 1:
        raise ConfigError(f"--before-iteration is {before}; give a number >= 1")
    _require_older(root, arguments)
    if _note(arguments, before):
        print(f"run the same command again: it resumes from before iteration {before}")
        return 0
    incarnation = _running(root, arguments.job)
    if incarnation is None:
        folder = state_folder(arguments.job, arguments.state_dir)
        raise ConfigError(f"there are no notes of a job {arguments.job!r} in {folder}")
    for path in sockets(root, arguments.job):
        answer = ask(path, m.Rewind(before))
        if isinstance(answer, m.Refused):
            raise ControlPlaneError(f"{path.parent.name}: {answer.reason}; try again")
    return _wait(root, arguments, incarnation)


def _require_older(root: Path, arguments: argparse.Namespace) -> None:
    """Refuses a rewind that nothing could serve, so that it changes nothing; ConfigError."""
    before = arguments.before_iteration
    record = read_record(state_folder(arguments.job, arguments.state_dir), arguments.job)
    held = _in_memory(root, arguments)
    if any(iteration < before for iteration in held):
        return
    there = f"holds iterations {', '.join(map(str, held))}" if held else "holds no snapshot"
    text = f"the memory of job {arguments.job!r} {there}: nothing from before {before}"
    if not arguments.from_disk:
        raise ConfigError(
            f"{text}. Give a later iteration, or --from-disk if a checkpoint on disk shall serve"
        )
    problems = ["the job has no notes"] if record is None else _against_disk(record, before)
    known = set() if record is None else record.shards.keys()
    here = {arena.stem for arena in (root / arguments.job).glob(f"*/*{SUFFIX}")}
    if problems and known - here:
        print(f"{len(known - here)} shards are on other machines, whose memory was not looked at")
    elif problems:
        raise ConfigError(
            f"{text}; nor on disk: {'; '.join(problems)}. Nothing was changed; give a later "
            "iteration"
        )


def _in_memory(root: Path, arguments: argparse.Namespace) -> list[int]:
    """Iterations of the snapshots that are whole in memory, newest first."""
    if not node_folders(root / arguments.job):
        return []
    try:
        return [s.iteration for s in common.open_memory(arguments).snapshots()]
    except SnapshotUnavailableError:
        return []


def _against_disk(record: JobRecord, before: int) -> list[str]:
    """Reasons for which no checkpoint on disk can serve a rewind; none if one can."""
    drain_dir, own_dir = record.disk.drain_dir, record.disk.checkpoint_dir
    if not (drain_dir or own_dir):
        return ["the job has neither --drain-dir nor --checkpoint-dir"]
    problems: list[str] = []
    if drain_dir:
        found, problems = find(Path(drain_dir), record.job)
        wanted = DiskCriteria(
            shard_count=len(record.shards),
            lineage=record.lineage,
            reason_against=record.quarantine.rewound(before).reason_against,
        )
        choice = choose(found, wanted)
        if choice.taken is not None:
            return []
        problems += choice.reasons or [f"{drain_dir} holds no checkpoint of the job"]
    if own_dir:
        own = newest_checkpoint(Path(own_dir))
        iteration = -1 if own is None else iteration_of(own)
        if 0 <= iteration < before:
            return []
        newest = "none" if own is None else own.name
        problems.append(f"the framework's newest checkpoint in {own_dir} is {newest}")
    return problems


def _running(root: Path, job: str) -> int | None:
    """The incarnation of a job that a supervisor leads, None of one that none does."""
    view = collect(root, job).get(job)
    return view["summary"]["incarnation"] if view is not None and view["supervised"] else None


def _note(arguments: argparse.Namespace, before: int) -> bool:
    """Leave word for the supervisor that is started next; False if there is one, or no notes.

    The lock tells, not the SMPs: the lease of one that has ended lasts a while longer.
    """
    folder = state_folder(arguments.job, arguments.state_dir)
    if read_record(folder, arguments.job) is None:
        return False
    try:
        with JobState(folder, arguments.job) as state:
            state.update(quarantine=state.record.quarantine.rewound(before))
    except JobHeldError:
        return False
    return True


def _wait(root: Path, arguments: argparse.Namespace, incarnation: int) -> int:
    deadline = time.monotonic() + arguments.timeout
    while time.monotonic() < deadline:
        summary: dict[str, Any] = collect(root, arguments.job).get(arguments.job, {})
        summary = summary.get("summary", {})
        if (
            summary.get("incarnation", incarnation) > incarnation
            and summary.get("resumed_from") is not None
        ):
            iteration = summary["resumed_from"]
            framework = "the framework's checkpoint, or scratch if there is none"
            source = f"iteration {iteration}" if iteration >= 0 else framework
            print(f"job {arguments.job} resumes from {source}")
            return 0
        time.sleep(0.1)
    print(f"job {arguments.job} got the request, but has not started again; see its supervisor")
    return 3
