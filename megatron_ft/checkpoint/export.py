"""Turns a snapshot into a checkpoint of its framework's own: forms, formats and who writes them.

A form is what a rank would put into its framework's own checkpoint, with names in the place of
tensors.  It is recorded once, when training starts, and kept as bytes with every snapshot.
With it a snapshot becomes a checkpoint without a trainer, a model or a GPU.  The folder of a
checkpoint appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.checkpoint.source import OpenSnapshot
from megatron_ft.core.errors import UNREADABLE, ConfigError, ExportError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.objects import MOST_BYTES, Part, decode, encode

MARK = ".megatron-ft-export.json"
"""File in an export that tells it from the framework's own checkpoints."""


class ExportMark(msgspec.Struct, frozen=True):
    """Job and snapshot that an export was made of, and its folder's name.

    A copy, or a folder that was renamed, is the user's own.
    """

    job: uuid.UUID
    snapshot: SnapshotId
    name: str

    @classmethod
    def of(cls, folder: Path) -> ExportMark | None:
        """The mark of a folder; None if it is not an export."""
        try:
            mark = msgspec.json.decode((folder / MARK).read_bytes(), type=cls)
        except (OSError, *UNREADABLE):
            return None
        return mark if mark.name == folder.name else None


@contextmanager
def whole_folder(
    folder: Path, shards: OpenSnapshot, disk: DiskCalls | None = None
) -> Iterator[Path]:
    """A folder to write to, which gets the name ``folder`` when the block has ended well.

    Before that ``shards`` are checked, which may still refuse, the folder gets its mark, and what
    was written is made durable.  After an error nothing is left of it.
    """
    disk, partial = disk or DiskCalls(), partial_of(folder, shards.job)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        reach("export.written")
        shards.check()
        mark = ExportMark(shards.job, shards.info.snapshot, folder.name)
        (partial / MARK).write_bytes(msgspec.json.encode(mark))
        _sync(partial, disk)
        disk.rename(partial, folder)
        disk.sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_of(folder: Path, job: uuid.UUID) -> Path:
    """Folder in which a job writes ``folder``; another job may write one of that name, too."""
    return folder.with_name(f".{folder.name}.{job.hex[:8]}.partial")


def _sync(folder: Path, disk: DiskCalls) -> None:
    """Frameworks sync some of the files that they write, and not others."""
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = disk.open(Path(base, name))
            try:
                disk.sync(descriptor)
            finally:
                os.close(descriptor)
        disk.sync_folder(Path(base))


FORM_VERSION = 3


class CheckpointForm(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's form.

    ``framework`` is the distribution that trained (``megatron-core``, ``deepspeed``),
    ``release`` its version, ``rank`` the global rank.  ``state`` is of the integration's
    own making, of what :func:`dump_form` gives; empty if there is none, for the reason in
    ``problem``.
    """

    framework: str
    release: str
    rank: int
    state: bytes = b""
    problem: str = ""
    version: int = FORM_VERSION

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckpointForm:
        """The form back; ExportError if the bytes are none, or of another release."""
        try:
            form = msgspec.msgpack.decode(data, type=cls)
        except UNREADABLE as error:
            raise ExportError(
                "the snapshot says nothing of checkpoints: it was not taken by our integration of "
                "Megatron-LM or DeepSpeed"
            ) from error
        if form.version != FORM_VERSION:
            raise ExportError(
                f"the snapshot describes its checkpoint in version {form.version}, this release "
                f"reads {FORM_VERSION}: export with the release that took the snapshot"
            )
        return form

    def require(self, shard_id: str, framework: str, installed: str) -> CheckpointForm:
        """This form; ExportError if the ``installed`` release of ``framework`` cannot use it."""
        if self.framework != framework:
            raise ExportError(f"shard {shard_id} was trained by {self.framework}, not {framework}")
        if self.problem:
            raise ExportError(
                f"{framework} could not describe shard {shard_id} when training started "
                f"({self.problem}), so it cannot be exported"
            )
        if self.release != installed:
            raise ExportError(
                f"the snapshot was taken with {framework} {self.release}, installed is "
                f"{installed}: export with the release that trained"
            )
        return self


class TensorRecipe(NamedTuple):
    """A tensor of a checkpoint, by the captured tensor that it is made from.

    It is the window (shape, stride, offset: elements) of the captured tensor ``name``,
    converted to ``dtype``.  With a ``place`` (what tells one parameter from all others: its
    global name, and the offset of its first piece) the window is of a whole parameter, of
    which the tensors of that name and place on all ranks are ranges.  An empty name stands
    for a tensor without a value: padding, or a placeholder without elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    stride: tuple[int, ...] = ()
    place: tuple[str, tuple[int, ...]] | None = None
    requires_grad: bool = False


def dump_form(value: Any, describe: Callable[[Any], TensorRecipe | None]) -> bytes:
    """``value`` encoded and compressed, with what ``describe`` gives in the place of its parts.

    ``describe`` gets every object in it but numbers and texts, and returns None for those that
    are kept as they are.  What it raises comes through; UnencodableError as of core.objects.encode.
    """

    def stand_in(part: Any) -> Part | None:
        wanted = describe(part)
        return None if wanted is None else Part(tuple(wanted))

    return zlib.compress(encode(value, stand_in))


def load_form(state: bytes, make: Callable[[TensorRecipe], Any] = lambda wanted: wanted) -> Any:
    """Decodes what :func:`dump_form` was given, with ``make(wanted)`` in the place of parts.

    Imports the framework's classes that it holds.  UndecodableError if that is not possible, or
    the bytes are not a form; what ``make`` raises of our own errors comes through.
    """
    return decode(_decompressed(state), lambda plain: make(TensorRecipe(*plain)))


def _decompressed(state: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(state, MOST_BYTES)
    except zlib.error as error:
        raise ExportError(f"the stored form cannot be read: {error}") from error
    if not stream.eof:
        raise ExportError(f"the stored form is cut off, or has more than {MOST_BYTES} bytes")
    return plain


_WRITERS = {
    "torch_dist": "megatron_ft.megatron.exporter",
    "deepspeed": "deepspeed_ext.exporter",
}
_NATIVE = {"megatron-core": "torch_dist", "deepspeed": "deepspeed"}

FORMATS = tuple(_WRITERS)
"""Names of formats."""


class FormatWriter(Protocol):
    """A module that writes checkpoints of one format."""

    def folder_of(self, directory: Path, iteration: int) -> Path:
        """The folder in which the framework looks for the checkpoint of an iteration."""

    def export(self, shards: OpenSnapshot, folder: Path) -> None:
        """Write ``folder``; it appears whole or not at all.  ExportError says what is missing."""

    def announce(self, directory: Path, iteration: int) -> None:
        """Have the framework load this iteration, unless ``directory`` holds a newer one."""

    def advice(self, directory: Path) -> str:
        """Flags or call that continue from ``directory``, in the framework's own words."""


def writer_of(name: str) -> FormatWriter:
    """The writer of a format; ExportError if the framework is not installed."""
    try:
        return cast(FormatWriter, import_module(_WRITERS[name]))
    except ImportError as error:
        raise ExportError(f"{name} needs the framework that trained: {error}") from error


def format_of(shards: OpenSnapshot) -> str:
    """The format of the framework that trained; ExportError if nothing was recorded of it."""
    form = CheckpointForm.from_bytes(next(iter(shards.values())).form)
    if form.framework not in _NATIVE:
        raise ExportError(f"no exporter for {form.framework}, which trained")
    return _NATIVE[form.framework]


def export(shards: OpenSnapshot, directory: Path, name: str | None = None) -> tuple[Path, str]:
    """Write one checkpoint into ``directory``; its folder, and how to resume from it.

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
