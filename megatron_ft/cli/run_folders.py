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
from megatron_ft.config import SETTINGS
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.process_tools import in_thread
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.spec import JobSpec

EXPORTS = ("drain_export_dir",)
"""Settings that name folders of exports."""
DISK_TIMEOUT_SECONDS = 30.0
"""Longest wait for a folder on a disk, which may hang."""


@contextmanager
def folders_ready(spec: JobSpec, state: JobState) -> Iterator[None]:
    """Makes what drains and exports are written to; no other job exports there in the block.

    ConfigError names the flag of a folder that cannot be used, or the job that exports there;
    of a job that had no incarnation yet no notes stay then.  A job that has run keeps its
    snapshots in memory, so an outage of a disk is reported and does not stop it.
    """
    holder = Holder(spec.name, state.record.job, socket.gethostname(), os.getpid())
    with ExitStack() as held:
        try:
            usable = _usable_folders(spec, resumed=state.record.incarnation > 0)
            for name in EXPORTS:
                folder = getattr(spec.settings, name)
                problem = held.enter_context(hold(folder, holder)) if name in usable else ""
                flag = SETTINGS[name].run_flag
                if problem:
                    say(
                        f"{flag} {folder} cannot be locked ({problem}): see to it that no "
                        "other job exports there"
                    )
        except ConfigError:
            if not (state.record.incarnation or state.record.smps):
                state.remove()
            raise
        yield


def _usable_folders(spec: JobSpec, *, resumed: bool) -> list[str]:
    """Settings whose folder was made and can be written to."""
    usable = []
    for name in ("drain_dir", *EXPORTS):
        folder, flag = getattr(spec.settings, name), SETTINGS[name].run_flag
        if folder is None:
            continue
        try:
            asyncio.run(in_thread(partial(make_folder, flag, folder), DISK_TIMEOUT_SECONDS))
            usable.append(name)
        except asyncio.TimeoutError:
            problem = f"{flag} {folder} did not answer within {DISK_TIMEOUT_SECONDS:.0f} s"
            if not resumed:
                raise ConfigError(f"{problem}; choose another one") from None
            say(f"{problem}. The job resumes without it; each drain tries again")
        except ConfigError as error:
            if not resumed:
                raise
            say(f"{error}. The job resumes without it; each drain tries again")
    return usable


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
            f"{flag} {folder} may not be written to by user {os.geteuid()}, or is no folder; "
            "choose another one"
        )


_HEADS = {
    "detect": "detect",
    "kill": "kill",
    "decide": "decide",
    "launch": "launch",
    "imports": "import",
    "communicators": "connect",
    "set_up": "set up",
    "restore": "restore",
    "first_iteration": "iterate",
}
_MOST_ROWS = 20


class RunSummary:
    """An observer that remembers what is worth saying at the end."""

    def __init__(self) -> None:
        self._recoveries: list[JobEvent] = []
        self._places: dict[str, str] = {}

    def __call__(self, event: JobEvent) -> None:
        """Record an event."""
        if event.kind == "recovered":
            self._recoveries.append(event)
        elif event.kind == "drained":
            self._places["on disk"] = f"iteration {event.fields['iteration']}: " + str(
                event.fields["folder"]
            )
        elif event.kind == "exported":
            self._places["exported"] = event.text

    def lines(self) -> list[str]:
        """A table of recoveries, if there were any, and where the newest files are."""
        places = [f"{name}: {place}" for name, place in self._places.items()]
        return self._table() + places

    def _table(self) -> list[str]:
        if not self._recoveries:
            return []
        shown = self._recoveries[-_MOST_ROWS:]
        head = f"{'total':>8}" + "".join(f"{name:>9}" for name in _HEADS.values())
        rows = [
            f"{event.fields['total']:8.2f}"
            + "".join(f"{event.fields[name]:9.2f}" for name in _HEADS)
            for event in shown
        ]
        return [f"recoveries: {len(self._recoveries)}; seconds, of the slowest rank:", head, *rows]
