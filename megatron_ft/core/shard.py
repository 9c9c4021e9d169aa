"""Contents of a shard: a table of tensors at fixed offsets, their logical places, and meta.

A layout is planned once, from the first complete training state, and every snapshot
after it is raw copies.  The table lists tensors by name, in sorted order, so that the
same state gives the same bytes whatever order a framework enumerates it in.  No torch
here: dtypes are names such as ``bfloat16``, memory is an address.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from megatron_ft.core.errors import UNREADABLE, LayoutMismatchError
from megatron_ft.core.objects import encode

ALIGNMENT = 64
LAYOUT_VERSION = 2


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A strided window of a local tensor, and where it lies in the unsharded model.

    The window is ``torch.as_strided(flat, shape, stride, offset)`` of the flattened local
    tensor, in elements; in the global tensor it fills the box at ``global_offset``, whose
    first ``len(global_shape) - len(shape)`` dimensions have size 1.  Most tensors are one
    piece; a gated projection is two, because its halves are sharded one by one.
    """

    global_name: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of the window in the global tensor."""
        leading = (1,) * (len(self.global_shape) - len(self.shape))
        sizes = zip(self.global_offset, leading + self.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sizes)


class LogicalPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place of a local tensor in the unsharded model, for a reshape or an export.

    The tensor's elements are ``start`` and following of a flattened local parameter of
    ``elements`` elements (a distributed optimizer owns a range of it), which consists
    of ``pieces``.
    """

    start: int
    elements: int
    pieces: tuple[Piece, ...]


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One live tensor as the planner sees it.

    ``address`` is where its bytes are, 0 when unknown; it may be an alias of another
    tensor only if ``contiguous``: its values are those bytes, one behind the other.
    ``split`` is (part, parts) for a replicated tensor of which this rank captures one
    part, (0, 1) for any other.
    """

    name: str
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    address: int = 0
    contiguous: bool = True
    boundary: bool = False
    split: tuple[int, int] = (0, 1)
    logical: LogicalPlace | None = None

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)


class LayoutEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a layout.

    ``offset`` and ``nbytes`` are bytes from the start of the slot's data region.
    Elements ``start`` to ``stop`` of the flattened tensor are stored.  An entry with
    ``alias_of`` owns no bytes: its offset points into those of that other entry.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    start: int
    stop: int
    boundary: bool
    alias_of: str
    parts: int
    logical: LogicalPlace | None

    @property
    def is_split(self) -> bool:
        """True when other ranks store the rest of this tensor."""
        return self.parts > 1

    def describe(self) -> str:
        """Dtype, shape and stored range, for messages."""
        text = f"{self.dtype}{list(self.shape)}"
        return f"{text} elements {self.start}:{self.stop}" if self.is_split else text


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """The byte layout of one shard; equal hashes mean that bytes are interchangeable."""

    version: int
    tensor_bytes: int
    entries: tuple[LayoutEntry, ...]

    def to_bytes(self) -> bytes:
        """Canonical MessagePack: equal layouts give equal bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ShardLayout:
        """The layout back; LayoutMismatchError if the bytes are none of this version.

        Every entry of the result lies inside ``tensor_bytes``.
        """
        try:
            layout = msgspec.msgpack.decode(data, type=cls)
        except UNREADABLE as error:
            raise LayoutMismatchError(
                f"the stored layout ({len(data)} bytes) cannot be read: {error}; "
                "it was written by another release, restore with that one"
            ) from error
        if layout.version != LAYOUT_VERSION:
            raise LayoutMismatchError(
                f"the stored layout has version {layout.version}, this release reads "
                f"{LAYOUT_VERSION}; restore with the release that wrote it"
            )
        outside = layout._outside()
        if outside:
            raise LayoutMismatchError(
                f"the stored layout is damaged: {', '.join(outside[:8])} would lie outside its "
                f"{layout.tensor_bytes} bytes; restore another snapshot"
            )
        return layout

    def _outside(self) -> list[str]:
        """Names of entries with a range outside the layout's bytes."""
        size = self.tensor_bytes
        return [
            entry.name
            for entry in self.entries
            if not (
                0 <= entry.start <= entry.stop
                and 0 <= entry.nbytes
                and 0 <= entry.offset <= size - entry.nbytes
            )
        ]

    def hash(self) -> bytes:
        """blake2b-32 of ``to_bytes()``."""
        return hashlib.blake2b(self.to_bytes(), digest_size=32).digest()

    def by_name(self) -> dict[str, LayoutEntry]:
        return {entry.name: entry for entry in self.entries}


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose last dimension is dense."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def align(offset: int) -> int:
    """The next multiple of 64 bytes: a cache line, and enough for every dtype."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def split_range(elements: int, part: int, parts: int) -> tuple[int, int]:
    """The elements that part ``part`` of ``parts`` stores; the parts partition the tensor."""
    assert 0 <= part < parts
    return part * elements // parts, (part + 1) * elements // parts


def plan_layout(specs: Iterable[TensorSpec]) -> ShardLayout:
    """Assign offsets; each byte of memory is captured once.

    A contiguous tensor whose memory lies within that of another captured one becomes
    an alias of it (tied weights, views into flat buffers).  Raises
    LayoutMismatchError when two tensors have the same name.
    """
    ordered = sorted(specs, key=lambda spec: spec.name)
    for left, right in zip(ordered, ordered[1:], strict=False):
        if left.name == right.name:
            raise LayoutMismatchError(f"two tensors are called {left.name!r}; rename one of them")
    owner_of = _find_owners(ordered)
    entries: dict[str, LayoutEntry] = {}
    offset = 0
    for spec in ordered:
        if spec.name not in owner_of:
            entries[spec.name] = entry = _owned_entry(spec, offset)
            offset = align(offset + entry.nbytes)
    for spec in ordered:
        if spec.name in owner_of:
            owner = owner_of[spec.name]
            entries[spec.name] = _alias_entry(spec, owner, entries[owner.name])
    return ShardLayout(LAYOUT_VERSION, offset, tuple(entries[s.name] for s in ordered))


def _owned_entry(spec: TensorSpec, offset: int) -> LayoutEntry:
    start, stop = split_range(spec.elements, *spec.split)
    return LayoutEntry(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        offset=offset,
        nbytes=(stop - start) * spec.item_bytes,
        start=start,
        stop=stop,
        boundary=spec.boundary,
        alias_of="",
        parts=spec.split[1],
        logical=spec.logical,
    )


def _alias_entry(spec: TensorSpec, owner: TensorSpec, stored: LayoutEntry) -> LayoutEntry:
    """An entry into the bytes of ``owner``; of a split owner it shares the stored range."""
    whole = not stored.is_split
    return LayoutEntry(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        offset=stored.offset + (spec.address - owner.address if whole else 0),
        nbytes=spec.elements * spec.item_bytes if whole else stored.nbytes,
        start=0 if whole else stored.start,
        stop=spec.elements if whole else stored.stop,
        boundary=stored.boundary,
        alias_of=owner.name,
        parts=stored.parts,
        logical=spec.logical,
    )


def _find_owners(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """The containing tensor of each tensor that needs no bytes of its own.

    Larger memory comes first at one address, so one pass finds every containment.
    A split owner serves only exact twins: of a part of it, bytes might be elsewhere.
    A tensor that forward may change is never left to a lazily copied owner.
    """
    memory = sorted(
        (s.address, -_memory_bytes(s), not s.boundary, s.name, s)
        for s in specs
        if s.address and s.contiguous and s.elements
    )
    owners: dict[str, TensorSpec] = {}
    current: TensorSpec | None = None
    reach = 0
    for address, less_bytes, _, name, spec in memory:
        end = address - less_bytes
        if current is not None and address < reach and _serves(current, spec):
            owners[name] = current
        elif end > reach:
            current, reach = spec, end
    return owners


def _serves(owner: TensorSpec, spec: TensorSpec) -> bool:
    if spec.boundary and not owner.boundary:
        return False
    if owner.split != (0, 1) or spec.split != (0, 1):
        twins = (owner.address, owner.dtype, owner.shape) == (spec.address, spec.dtype, spec.shape)
        return twins and owner.split == spec.split
    return spec.address >= owner.address and _end(spec) <= _end(owner)


def _memory_bytes(spec: TensorSpec) -> int:
    return spec.elements * spec.item_bytes


def _end(spec: TensorSpec) -> int:
    return spec.address + _memory_bytes(spec)


def layout_differences(stored: ShardLayout, live: ShardLayout, limit: int = 8) -> tuple[str, ...]:
    """Differences of two layouts, one sentence per tensor, at most ``limit`` and then a count.

    A place in the unsharded model counts only if both sides know it: it shows that another
    pipeline split gave the same names and shapes to other layers, and where a framework
    could not tell it, the bytes are good all the same.
    """
    ours, theirs = live.by_name(), stored.by_name()
    lines = [f"{name} is not in the snapshot" for name in sorted(ours.keys() - theirs.keys())]
    lines += [f"{name} is only in the snapshot" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        if not _interchangeable(theirs[name], ours[name]):
            lines.append(_entry_difference(theirs[name], ours[name]))
    if len(lines) > limit:
        lines[limit:] = [f"and {len(lines) - limit} more"]
    return tuple(lines)


def _interchangeable(stored: LayoutEntry, live: LayoutEntry) -> bool:
    if stored.logical is None or live.logical is None:
        stored = msgspec.structs.replace(stored, logical=None)
        live = msgspec.structs.replace(live, logical=None)
    return stored == live


def _entry_difference(stored: LayoutEntry, live: LayoutEntry) -> str:
    if stored.describe() != live.describe():
        return f"{live.name} is {live.describe()}, in the snapshot {stored.describe()}"
    if stored.logical != live.logical:
        return f"{live.name} lies elsewhere in the unsharded model than in the snapshot"
    return (
        f"{live.name} is stored at {live.offset} (alias of {live.alias_of or 'nothing'}), in "
        f"the snapshot at {stored.offset} (alias of {stored.alias_of or 'nothing'})"
    )


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The small parts of one shard.

    ``layout`` is what ShardLayout.to_bytes() gives, ``objects`` what objects.encode()
    gives of a dict by name.  ``form`` is what the state's ``checkpoint_form()`` gave, for an
    exporter; empty if it has none.  A shard that was reshaped has no objects of its own:
    ``origins`` are those of shards that it came from, by shard id, the nearest first.
    """

    layout: bytes
    objects: bytes
    form: bytes = b""
    origins: dict[str, bytes] = {}

    @property
    def nearest_objects(self) -> bytes:
        """The objects, or if it was reshaped, those of its nearest origin."""
        return next(iter(self.origins.values()), self.objects)


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
