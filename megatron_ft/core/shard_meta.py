"""What lies behind the tensors of a sealed region: the layout, and the small objects."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.objects import encode


class Meta(msgspec.Struct, frozen=True):
    """The small parts of one shard.

    ``layout`` is what ShardLayout.to_bytes() gives, ``objects`` what objects.encode()
    gives of a dict by name.  ``form`` is what the state's ``checkpoint_form()`` gave, for an
    exporter; empty if it has none.
    """

    layout: bytes
    objects: bytes
    form: bytes = b""


def pack_meta(layout_bytes: bytes, objects: dict[str, Any], form: bytes = b"") -> bytes:
    """The meta bytes of one snapshot; UnencodableError names what ``objects`` cannot hold."""
    return pack_encoded(layout_bytes, encode(objects), form)


def pack_encoded(layout_bytes: bytes, objects: bytes, form: bytes) -> bytes:
    """As pack_meta, of objects that were encoded when they were as they are to be kept."""
    return msgspec.msgpack.encode(Meta(layout_bytes, objects, form))


def unpack_meta(raw: bytes) -> Meta:
    """Meta bytes apart again, the objects not yet decoded; LayoutMismatchError if they are none."""
    try:
        return msgspec.msgpack.decode(raw, type=Meta)
    except UNREADABLE as error:
        raise LayoutMismatchError(
            f"the stored layout and objects ({len(raw)} bytes) cannot be read: {error}; they were "
            "written by another release, restore with that one"
        ) from error
