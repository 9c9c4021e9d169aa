"""Folders of jobs that nobody uses, on a machine where others test and train as well."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from megatron_ft.cli import clean


def unused(root: Path, ours: Collection[int]) -> set[Path]:
    """Folders of jobs under ``root`` of which no process lives, and that nobody else leads.

    All processes of a job may be dead while its supervisor, which may be a test's of another
    run, is about to start the next; ``ours`` are the processes of this run, which are not asked.
    """
    dead = [folder for folder in clean.find_jobs(root) if not clean.members(folder)]
    led = _locks(ours) if dead else set()
    return {folder.path for folder in dead if folder.job not in led}


def _locks(ours: Collection[int]) -> set[str]:
    """Names of the jobs of which processes other than ours have the lock on the notes open."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in ours:
            # It may end meanwhile, or be another user's.
            with suppress(OSError):
                for descriptor in os.listdir(f"/proc/{name}/fd"):
                    with suppress(OSError):
                        path = Path(os.readlink(f"/proc/{name}/fd/{descriptor}"))
                        found |= {path.parent.name} if path.name == "lock" else set()
    return found
