"""Folders that a job writes to, made and tried before training."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ft.disk.durable import Disk
from megatron_ft.errors import ConfigError
from megatron_ft.launch.spec import JobSpec


def make_folders(spec: JobSpec) -> None:
    """Make what drains and exports are written to; ConfigError names the flag."""
    for name in ("drain_dir", "drain_export_dir", "export_on_failure"):
        make_folder(f"--{name.replace('_', '-')}", getattr(spec, name))


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
