"""Give up what a job has done since an iteration, and resume from the newest snapshot before it.

  megatron-ft rewind --job NAME --before-iteration N

A running job is stopped and started again from there at once; a stopped one does so when it
is run again.  A state that is given up is never restored again, from memory or from disk.
How far back memory reaches depends on --slots; `megatron-ft status` shows its snapshots.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from megatron_ft.checkpoint.live import node_folders
from megatron_ft.cli import common
from megatron_ft.cli.status import collect
from megatron_ft.core.errors import ConfigError, ControlPlaneError, SnapshotUnavailableError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets
from megatron_ft.supervisor.job_state import (
    read_record,
    state_folder,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job_name(parser)
    parser.add_argument(
        "--before-iteration", type=int, required=True, metavar="N", help="the first to give up"
    )
    parser.add_argument(
        "--from-disk",
        action="store_true",
        help="also if memory holds nothing so old: a checkpoint on disk has to serve then, or the "
        "job starts from the framework's own, or stops",
    )
    common.add_folders(parser)


def main(arguments: argparse.Namespace) -> int:
    """Ask a running job for it, or note it for one that has stopped."""
    root, before = common.root_of(arguments), arguments.before_iteration
    if before < 1:
        raise ConfigError(f"--before-iteration is {before}; give a number >= 1")
    _require_older(root, arguments)
    if common.change_notes(
        arguments, lambda record: {"quarantine": record.quarantine.rewound(before)}
    ):
        print(f"run the same command again: it resumes from before iteration {before}")
        return 0
    view = collect(root, arguments.job).get(arguments.job)
    if view is None or not view["supervised"]:
        folder = state_folder(arguments.job, arguments.state_dir)
        raise ConfigError(
            f"{folder} has no notes of job {arguments.job!r}: give its name, and its --state-dir"
        )
    for path in sockets(root, arguments.job):
        answer = ask(path, m.Rewind(before))
        if isinstance(answer, m.Refused):
            raise ControlPlaneError(f"{path.parent.name}: {answer.reason}; try again")
    print(f"job {arguments.job} starts again from before iteration {before}")
    return 0


def _require_older(root: Path, arguments: argparse.Namespace) -> None:
    """Refuse, so that nothing changes, what memory cannot serve; ConfigError."""
    before, held = arguments.before_iteration, list[int]()
    if node_folders(root / arguments.job):
        with suppress(SnapshotUnavailableError):
            held = [s.iteration for s in common.open_memory(arguments).snapshots()]
    if any(iteration < before for iteration in held):
        return
    record = read_record(state_folder(arguments.job, arguments.state_dir), arguments.job)
    disk = None if record is None else record.disk
    if arguments.from_disk and (disk is None or disk.drain_dir or disk.checkpoint_dir):
        return
    there = f"holds iterations {', '.join(map(str, held))}" if held else "holds no snapshot"
    raise ConfigError(
        f"the memory of job {arguments.job!r} {there}: nothing from before {before}. Give a later "
        "iteration, or --from-disk if a checkpoint on disk shall serve (`megatron-ft verify` lists "
        "them)"
    )
