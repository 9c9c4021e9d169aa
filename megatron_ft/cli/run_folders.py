"""Folders that a job writes to: made and tried before training, listed at the end of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.checkpoint.export_drained import Holder, hold
from megatron_ft.cli.common import say
from megatron_ft.config import SWITCH
from megatron_ft.config.json_section import SECTION
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.process_tools import in_thread
from megatron_ft.supervisor.events import DrainedEvent, JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.spec import JobSpec

DISK_TIMEOUT_SECONDS = 30.0
"""Longest wait for a folder on a disk, which may hang."""


@contextmanager
def folders_ready(spec: JobSpec, state: JobState) -> Iterator[None]:
    """Makes what drains and exports are written to; no other job exports there in the block.

    ConfigError names the flag of a folder that cannot be used, or the job that exports there;
    of a job that had no incarnation yet no notes stay then.  A job that has run keeps its
    snapshots in memory, so an outage of a disk is reported and does not stop it.
    """
    holder, exports = (
        Holder(spec.name, state.record.job, socket.gethostname(), os.getpid()),
        spec.settings.drain_export_dir,
    )
    resumed = state.record.incarnation > 0
    with ExitStack() as held:
        try:
            _usable("--drain-dir", spec.settings.drain_dir, resumed)
            if exports is not None and _usable("--drain-export-dir", exports, resumed):
                problem = held.enter_context(hold(exports, holder))
                if problem:
                    say(
                        f"--drain-export-dir {exports} cannot be locked ({problem}): see to it "
                        "that no other job exports there"
                    )
        except ConfigError:
            if not (resumed or state.record.smps):
                state.remove()
            raise
        yield


def _usable(flag: str, folder: Path | None, resumed: bool) -> bool:
    """Make a folder and try it; whether it serves.  ConfigError unless the job is resumed."""
    try:
        asyncio.run(in_thread(partial(make_folder, flag, folder), DISK_TIMEOUT_SECONDS))
        return True
    except asyncio.TimeoutError:
        problem = f"{flag} {folder} did not answer within {DISK_TIMEOUT_SECONDS:.0f} s"
    except ConfigError as error:
        problem = str(error)
    if not resumed:
        raise ConfigError(f"{problem}; choose another one")
    say(f"{problem}. The job resumes without it; each drain tries again")
    return False


def make_folder(flag: str, folder: Path | None) -> None:
    """Make one, so that a wrong path is found now; ConfigError with the ``flag`` that gave it."""
    if folder is None:
        return
    try:
        DiskCalls().make_folder(folder.absolute())
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be made: {error.strerror}") from error
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"{flag} {folder} may not be written to by user {os.geteuid()}, or is not a folder"
        )


class RunSummary:
    """An observer that remembers what the last lines of a run are about: files, and protection.

    ``trained`` says that all ranks have registered once.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self.trained = False

    def __call__(self, event: JobEvent) -> None:
        if event.kind == "training":
            self.trained = True
        elif isinstance(event.facts, DrainedEvent):
            self._places["on disk"] = f"iteration {event.facts.iteration}: {event.facts.folder}"
        elif event.kind == "exported":
            self._places["exported"] = event.text

    def lines(self) -> list[str]:
        return [f"{name}: {place}" for name, place in self._places.items()]

    def unprotected(self) -> str:
        """A warning for a job that ends without ever having committed a snapshot."""
        why = "no snapshot was committed"
        if not self.trained:
            why = f"no rank asked for snapshots: does the command have {SWITCH}, or its JSON file "
            why += f"{SECTION!r}?"
        return f"megatron-ft: warning: nothing was protected; {why}"
