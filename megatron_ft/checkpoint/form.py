"""What a rank would put into its framework's own checkpoint, with names in the place of tensors.

Recorded once, when training starts, and kept as bytes beside every snapshot.  With it a
snapshot becomes a checkpoint of the framework's without a trainer, a model or a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.core.errors import ExportError
from megatron_ft.core.objects import decode, encode
from megatron_ft.core.objects.encode import Part
from megatron_ft.core.objects.format import MOST_BYTES

FORM_VERSION = 3


class CheckpointForm(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's form.

    ``framework`` is the distribution that trained (``megatron-core``, ``deepspeed``),
    ``release`` its version, ``rank`` the global rank.  ``state`` is of the integration's
    own making, of what :func:`dump` gives; empty if there is none, for the reason in ``problem``.
    """

    framework: str
    release: str
    rank: int
    state: bytes = b""
    problem: str = ""
    version: int = FORM_VERSION

    def to_bytes(self) -> bytes:
        """MessagePack."""
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


class Wanted(NamedTuple):
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


def dump(value: Any, describe: Callable[[Any], Wanted | None]) -> bytes:
    """``value`` encoded and compressed, with what ``describe`` gives in the place of its parts.

    ``describe`` gets every object in it but numbers and texts, and returns None for those that
    are kept as they are.  What it raises comes through; UnencodableError as of core.objects.encode.
    """

    def stand_in(part: Any) -> Part | None:
        wanted = describe(part)
        return None if wanted is None else Part(tuple(wanted))

    return zlib.compress(encode(value, stand_in))


def load(state: bytes, make: Callable[[Wanted], Any] = lambda wanted: wanted) -> Any:
    """What :func:`dump` was given, with ``make(wanted)`` in the place of parts.

    Imports the framework's classes that it holds.  UndecodableError if that is not possible, or
    the bytes are no such thing; what ``make`` raises of our own errors comes through.
    """
    return decode(_decompressed(state), lambda plain: make(Wanted(*plain)))


def _decompressed(state: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(state, MOST_BYTES)
    except zlib.error as error:
        raise ExportError(f"the stored form cannot be read: {error}") from error
    if not stream.eof:
        raise ExportError(f"the stored form is cut off, or has more than {MOST_BYTES} bytes")
    return plain
