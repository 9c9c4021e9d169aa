"""Folders that a job writes to, made and tried before training."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_ft.cli.say import say
from megatron_ft.disk.durable import Disk
from megatron_ft.errors import ConfigError
from megatron_ft.export.hold import Holder, hold
from megatron_ft.launch.job_state import JobState
from megatron_ft.launch.spec import JobSpec

EXPORTS = ("drain_export_dir", "export_on_failure")
"""Settings that name folders of exports."""


def make_folders(spec: JobSpec) -> None:
    """Make what drains and exports are written to; ConfigError names the flag."""
    for name in ("drain_dir", *EXPORTS):
        make_folder(flag_of(name), getattr(spec, name))


@contextmanager
def exports_held(spec: JobSpec, state: JobState) -> Iterator[None]:
    """Have no other job export to this one's folders while the block runs.

    ConfigError if one that runs does; of a job that had no life yet no notes stay then.
    """
    holder = Holder(spec.name, state.record.job, socket.gethostname(), os.getpid())
    with ExitStack() as held:
        try:
            for name in EXPORTS:
                folder = getattr(spec, name)
                problem = held.enter_context(hold(folder, holder)) if folder else ""
                if problem:
                    say(
                        f"{flag_of(name)} {folder} cannot be locked ({problem}): see to it that no "
                        "other job exports there"
                    )
        except ConfigError:
            if not (state.record.incarnation or state.record.smps):
                state.remove()
            raise
        yield


def flag_of(name: str) -> str:
    """The flag of ``megatron-ft run`` that gives a setting."""
    return f"--{name.replace('_', '-')}"


def make_folder(flag: str, folder: Path | None) -> None:
    """Make one, so that a wrong path is found now; ConfigError with the ``flag`` that gave it."""
    if folder is None:
        return
    try:
        Disk().make_folder(folder.absolute())
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be made: {error.strerror}") from error
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"{flag} {folder} may not be written to by user {os.geteuid()}, or is no folder; "
            "choose another one"
        )
