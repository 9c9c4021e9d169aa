"""Formats of checkpoints that snapshots can be exported to, and who writes them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from megatron_ft.checkpoint.form import CheckpointForm
from megatron_ft.checkpoint.source import OpenSnapshot
from megatron_ft.core.errors import ConfigError, ExportError

_WRITERS = {
    "torch_dist": "megatron_ft.megatron.export.write",
    "deepspeed": "deepspeed_ext.export.write",
}
_NATIVE = {"megatron-core": "torch_dist", "deepspeed": "deepspeed"}

FORMATS = tuple(_WRITERS)
"""Names of formats."""


def add_format(framework: str, name: str, module: str) -> None:
    """Have snapshots that ``framework`` trained become checkpoints by another Writer's module."""
    _WRITERS[name] = module
    _NATIVE[framework] = name


class Writer(Protocol):
    """A module that writes checkpoints of one format."""

    def folder_of(self, directory: Path, iteration: int) -> Path:
        """Where the framework looks for the checkpoint of an iteration in ``directory``."""

    def export(self, shards: OpenSnapshot, folder: Path) -> None:
        """Write ``folder``; it appears whole or not at all.  ExportError says what is missing."""

    def announce(self, directory: Path, iteration: int) -> None:
        """Have the framework load this iteration, unless ``directory`` holds a newer one."""

    def advice(self, directory: Path) -> str:
        """How to go on from ``directory``, in the framework's own words."""


def writer_of(name: str) -> Writer:
    """The writer of a format; ExportError if the framework is not installed."""
    try:
        return cast(Writer, import_module(_WRITERS[name]))
    except ImportError as error:
        raise ExportError(f"{name} needs the framework that trained: {error}") from error


def format_of(shards: OpenSnapshot) -> str:
    """The format of the framework that trained; ExportError if nothing was recorded of it."""
    form = CheckpointForm.from_bytes(next(iter(shards.values())).form)
    if form.framework not in _NATIVE:
        raise ExportError(f"no exporter for {form.framework}, which trained")
    return _NATIVE[form.framework]


def export(shards: OpenSnapshot, directory: Path, name: str | None = None) -> tuple[Path, str]:
    """Write one checkpoint into ``directory``; its folder, and how to go on from it.

    ``name`` is a format, that of the framework that trained if not given.  ConfigError if the
    folder is there already.
    """
    writer, iteration = writer_of(name or format_of(shards)), shards.info.iteration
    folder = writer.folder_of(directory, iteration)
    if folder.exists():
        raise ConfigError(f"{folder} exists already; export to another folder, or remove it")
    writer.export(shards, folder)
    writer.announce(directory, iteration)
    return folder, writer.advice(directory)
