"""Parts that several commands share: where a job's arenas are, and what is printed.

Output that nobody reads, or that a full disk refuses, ends no training.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_ft.config import SETTINGS
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.virtual import default_root
from megatron_ft.rpc.local_query import sockets

if TYPE_CHECKING:
    from megatron_ft.checkpoint.live import LiveSource
    from megatron_ft.checkpoint.source import SnapshotSource
    from megatron_ft.supervisor.job_state import JobRecord


def show_any_text() -> None:
    """Write what the terminal's encoding lacks as escapes: names of files, words of trainers."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str, to: TextIO | None = None) -> None:
    """Print a line at once, to the standard output if not ``to`` another; it is lost if it cannot
    be written."""
    with suppress(OSError):
        print(text, file=to, flush=True)


def replace_output(path: Path, text: str) -> None:
    """Write a file of the user's, which is whole at every moment."""
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def flush_output() -> None:
    """Flush the standard output, if this process has one; OSError if that fails."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_output() -> None:
    """Discard all further output, also that of the interpreter's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_SETTING = SETTINGS["arena_dir"]
_THE_JOB = "the only one here"


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arena-dir",
        type=Path,
        help=f"the --arena-dir of the job, if it has one (default: {_SETTING.variable}, as for "
        f"`megatron-ft run`, else {default_root()})",
    )


def root_of(arguments: argparse.Namespace) -> Path:
    """The folder of the flag, else of the environment; ConfigError if that names no folder."""
    named: Path | None = arguments.arena_dir or _SETTING.parse(
        os.environ.get(_SETTING.variable), _SETTING.variable
    )
    return named or default_root()


def add_job_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", help=f"name of the job (default: {_THE_JOB})")
    parser.set_defaults(job_of=the_job)


def the_job(arguments: argparse.Namespace) -> str:
    """The job that is meant without ``--job``; ConfigError unless there is exactly one.

    It is in the memory of this machine or has notes.  If there is none, it is the one that has
    ended last.
    """
    from megatron_ft.supervisor.event_log import EVENTS
    from megatron_ft.supervisor.job_state import noted_jobs, state_folder

    state_dir = getattr(arguments, "state_dir", None)
    found = noted_jobs(state_dir)
    if "arena_dir" in arguments:
        found |= {path.parent.parent.name for path in sockets(root_of(arguments), None)}
    ended = state_folder("any", state_dir).parent.glob(f"*/{EVENTS}")
    for path in sorted(ended, key=lambda path: path.stat().st_mtime)[-1:]:
        found = found or {path.parent.name}
    if len(found) == 1:
        return found.pop()
    there = f"are several jobs ({', '.join(sorted(found))})" if found else "is no job"
    raise ConfigError(f"there {there} here: give --job, and --state-dir if it has one")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Declare ``--job`` and ``--state-dir``, for commands that read the notes of one job."""
    add_job_name(parser)
    parser.add_argument("--state-dir", type=Path, help="the --state-dir of the job, if it has one")


def change_notes(
    arguments: argparse.Namespace, change: Callable[[JobRecord], dict[str, Any]]
) -> bool:
    """Change the notes of a job that has stopped; False if it runs, or has none.

    The lock tells, not the SMPs: the lease of a supervisor that has ended lasts a while longer.
    """
    from megatron_ft.supervisor.job_state import JobHeldError, JobState, read_record, state_folder

    folder = state_folder(arguments.job, arguments.state_dir)
    if read_record(folder, arguments.job) is None:
        return False
    try:
        with JobState(folder, arguments.job) as state:
            state.update(**change(state.record))
    except JobHeldError:
        return False
    return True


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Declare ``--arena-dir`` and ``--state-dir``."""
    add_argument(parser)
    parser.add_argument("--state-dir", type=Path, help="the --state-dir of the job, if it has one")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare ``--job`` or ``--from``, ``--iteration`` and the folders of ``open_source``."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--job", help=f"job whose memory is read (default: {_THE_JOB})")
    source.add_argument(
        "--from", dest="source", type=Path, metavar="DRAINED", help="drained checkpoint instead"
    )
    parser.add_argument("--iteration", type=int, help="this one instead of the newest")
    add_folders(parser)
    parser.set_defaults(job_of=lambda given: the_job(given) if given.source is None else None)


def open_source(arguments: argparse.Namespace) -> SnapshotSource:
    """The snapshots of ``add_source``'s flags; ConfigError if there are none."""
    if arguments.source is None:
        return open_memory(arguments)
    from megatron_ft.checkpoint.drained import open_checkpoint

    return open_checkpoint(arguments.source)


def open_memory(arguments: argparse.Namespace) -> LiveSource:
    """The snapshots in the memory of ``--job``; ConfigError if there is no such job."""
    # Most commands read no arena, and start faster without numpy.
    from megatron_ft.checkpoint.live import open_live
    from megatron_ft.supervisor.job_state import known_shards

    known = known_shards(arguments.job, arguments.state_dir)
    return open_live(root_of(arguments), arguments.job, shards=known)
