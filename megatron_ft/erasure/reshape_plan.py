"""Plans from which stored elements a shard of another layout is filled.  Pure: numbers only.

A *global tensor* is one of the unsharded model.  A *window* is a box of it whose elements lie
somewhere at a fixed offset and strides: among the stored elements of a layout entry, or in a
tensor that is to be filled.  A distributed optimizer stores a range of a flattened parameter,
which is a few boxes.  Intersections of boxes are boxes too, so a plan is a list of strided copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.identity import place_of_shard
from megatron_ft.core.shard import LayoutEntry, LogicalPlace, Piece, ShardLayout, row_major

Source = TypeVar("Source")


class Box(NamedTuple):
    """The elements of a global tensor from index ``start`` to before ``stop``, by dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size by dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class MissingRangeError(LayoutMismatchError):
    """No source holds some boxes of a global tensor; ``boxes`` are disjoint."""

    def __init__(self, name: str, boxes: Sequence[Box]) -> None:
        shown = ", ".join(map(str, boxes[:4])) + (", ..." if len(boxes) > 4 else "")
        super().__init__(f"no shard that is left holds {name}{shown}")
        self.boxes = tuple(boxes)


class Window(NamedTuple):
    """A box of the global tensor ``name`` of ``shape``; where its elements lie, in elements."""

    name: str
    shape: tuple[int, ...]
    box: Box
    offset: int
    stride: tuple[int, ...]

    def at(self, start: Sequence[int]) -> int:
        """Offset of the element with this global index."""
        steps = zip(start, self.box.start, self.stride, strict=True)
        return self.offset + sum((a - b) * stride for a, b, stride in steps)

    def inside(self, box: Box) -> Window:
        """The part of the window that is in a box inside its own."""
        return self._replace(box=box, offset=self.at(box.start))


class Copy(NamedTuple, Generic[Source]):
    """A strided copy of ``shape`` elements out of ``source``; offsets and strides in elements."""

    source: Source
    shape: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """First element of the source that is read, and the end of the last."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.source_stride, strict=True))
        return self.source_offset, self.source_offset + last + 1


def whole(name: str, shape: tuple[int, ...]) -> Window:
    """The window of a whole tensor in row-major order."""
    return Window(name, shape, Box((0,) * len(shape), shape), 0, row_major(shape))


def windows(entry: LayoutEntry) -> Iterator[Window]:
    """The windows of a layout entry; offsets count its stored elements.

    A tensor without a logical place is a global tensor of its own.
    """
    place = entry.logical
    if place is None:
        tensor, none = whole(entry.name, entry.shape), (0,) * len(entry.shape)
        piece = Piece(entry.name, entry.shape, none, entry.shape, 0, tensor.stride)
        place = LogicalPlace(0, math.prod(entry.shape), (piece,))
    first, stop = place.start + entry.start, place.start + entry.stop
    for piece in place.pieces:
        for part in _between(_window(piece), first, stop):
            yield part._replace(offset=part.offset - first)


def _window(piece: Piece) -> Window:
    """The window of a piece in the flattened parameter."""
    box = Box(piece.global_offset, tuple(one.stop for one in piece.box))
    stride = (0,) * (len(piece.global_shape) - len(piece.shape)) + piece.stride
    return Window(piece.global_name, piece.global_shape, box, piece.offset, stride)


def _between(window: Window, first: int, stop: int) -> Iterator[Window]:
    """The parts of a window whose elements lie from ``first`` to before ``stop``."""
    shape = window.box.shape
    reach = [(n - 1) * s for n, s in zip(shape, window.stride, strict=True)]
    if 0 in shape or window.offset >= stop or window.offset + sum(reach) < first:
        return
    if window.offset >= first and window.offset + sum(reach) < stop:
        yield window
        return
    # Rows of the longest stride that are inside as a whole stay together; the ends are cut.
    axis = max(range(len(shape)), key=lambda a: window.stride[a] if shape[a] > 1 else -1)
    stride, inner = window.stride[axis], sum(reach) - reach[axis]
    before, behind = first - window.offset, stop - 1 - window.offset
    touched = range(max(0, -(-(before - inner) // stride)), min(shape[axis], behind // stride + 1))
    low = max(0, -(-before // stride))
    high = max(low, min(shape[axis], (behind - inner) // stride + 1))
    if low >= high:
        low = high = touched.stop
    # Few rows: those that hold an end of the range, and what a transposed parameter puts beside it.
    cut = (*range(touched.start, low), *range(high, touched.stop))
    ranges = [(row, row + 1) for row in cut]
    for start, end in [*ranges, (low, high)] if low < high else ranges:
        yield from _between(window.inside(_cut(window.box, axis, start, end)), first, stop)


def _cut(box: Box, axis: int, start: int, end: int) -> Box:
    """Rows ``start`` to ``end`` of a box along one dimension."""
    base = box.start[axis]
    return Box(
        (*box.start[:axis], base + start, *box.start[axis + 1 :]),
        (*box.stop[:axis], base + end, *box.stop[axis + 1 :]),
    )


def common(one: Box, other: Box) -> Box | None:
    """The box that two boxes have in common, None if there is none."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def without(box: Box, inner: Box) -> Iterator[Box]:
    """Disjoint boxes that are ``box`` without ``inner``, which lies inside it."""
    rest = box
    for axis in range(len(box.start)):
        low, high = inner.start[axis] - rest.start[axis], inner.stop[axis] - rest.start[axis]
        size = rest.stop[axis] - rest.start[axis]
        if low > 0:
            yield _cut(rest, axis, 0, low)
        if high < size:
            yield _cut(rest, axis, high, size)
        rest = _cut(rest, axis, low, high)


def fill(target: Window, sources: Iterable[tuple[Source, Window]]) -> list[Copy[Source]]:
    """The copies that fill every element of ``target`` exactly once.

    Earlier sources are preferred.  MissingRangeError names the boxes that none of them holds.
    """
    rest, copies = [target.box] if 0 not in target.box.shape else [], list[Copy[Source]]()
    for source, window in sources:
        left: list[Box] = []
        for box in rest:
            shared = common(box, window.box)
            if shared is None:
                left.append(box)
                continue
            copies.append(_copy(source, window.inside(shared), target.inside(shared)))
            left += without(box, shared)
        rest = left
        if not rest:
            return copies
    if rest:
        raise MissingRangeError(target.name, rest)
    return copies


def _copy(source: Source, held: Window, wanted: Window) -> Copy[Source]:
    shape = held.box.shape
    return Copy(source, shape, held.offset, held.stride, wanted.offset, wanted.stride)


class Stored(NamedTuple):
    """One tensor of an old shard."""

    shard_id: str
    entry: LayoutEntry


class Fill(NamedTuple):
    """One copy out of an old shard into a new one; both tensors are of the same dtype."""

    copy: Copy[Stored]
    target: LayoutEntry


def related(shard_id: str, old: Iterable[str], *, experts: bool = True) -> tuple[str, ...]:
    """The old shards of the model-parallel place of a new one, the nearest first.

    The one of the same data-parallel number comes first, or if there is none, those from this
    number modulo theirs on.  Without ``experts`` the place is that in the dense part of the model.
    """
    place = place_of_shard(shard_id)
    if place is None:
        return (shard_id,) if shard_id in old else ()
    peers = []
    for one in old:
        other = place_of_shard(one)
        if other is not None and other[:2] == place[:2] and (other.ep == place.ep or not experts):
            peers.append((other.dp, one))
    peers.sort()
    numbers = [number for number, _ in peers]
    same = place.dp in numbers
    first = numbers.index(place.dp) if same else place.dp % max(1, len(peers))
    return tuple(one for _, one in peers[first:] + peers[:first])


def origins_of(shard_id: str, old: Sequence[str]) -> tuple[str, ...]:
    """The old shards whose small objects a new one is given: its nearest, and the job's first."""
    nearest = related(shard_id, old)[:1] or related(shard_id, old, experts=False)[:1]
    return tuple(dict.fromkeys((*nearest, min(old))))


def names_of(layout: ShardLayout) -> set[str]:
    """Names of the tensors that a shard holds parts of: global ones, and those without a place."""
    placed = {window.name for entry in layout.entries for window in windows(entry)}
    return placed | {entry.name for entry in layout.entries if entry.logical is None}


class OldTensors:
    """The tensors of all old shards, by global name; ``ranks`` says where the shards are."""

    def __init__(self, layouts: Mapping[str, ShardLayout], ranks: Mapping[str, int]) -> None:
        self._shards, self._ranks = tuple(sorted(layouts)), ranks
        self._placed: dict[str, list[tuple[Stored, Window]]] = {}
        self._plain: dict[str, dict[str, LayoutEntry]] = {}
        for shard_id in self._shards:
            for entry in layouts[shard_id].entries:
                if entry.logical is None:
                    self._plain.setdefault(entry.name, {})[shard_id] = entry
                    continue
                for window in windows(entry):
                    stored = (Stored(shard_id, entry), window)
                    self._placed.setdefault(window.name, []).append(stored)

    def fills(self, shard_id: str, layout: ShardLayout, rank: int) -> Iterator[Fill]:
        """The copies that make a new shard, which is on this rank of the world.

        Of equal sources those on the same rank are preferred, then those that have given least.
        MissingRangeError for elements that no old shard holds, LayoutMismatchError for a tensor of
        another shape: it is another model.
        """
        given: Counter[str] = Counter()
        for entry in layout.entries:
            if entry.alias_of:
                continue
            for window in windows(entry):
                found = self._sources(shard_id, entry, window)
                if entry.logical is not None:
                    found.sort(key=lambda one: self._cost(one[0].shard_id, rank, given))
                try:
                    copies = fill(window, found)
                except MissingRangeError as error:
                    raise MissingRangeError(f"{window.name} of {shard_id}", error.boxes) from error
                for copy in copies:
                    given[copy.source.shard_id] += math.prod(copy.shape)
                    yield Fill(copy, entry)

    def require_wanted(self, names: Collection[str]) -> None:
        """LayoutMismatchError if an old tensor is none of ``names``, which new shards have."""
        left = sorted((self._placed.keys() | self._plain.keys()) - set(names))
        if left:
            raise LayoutMismatchError(
                f"{len(left)} tensors are only in the snapshot, {left[0]} first: another model, or "
                "other settings of its optimizer. Run with the flags of the snapshot, or under "
                "another --job name; the snapshot stays in memory"
            )

    def _cost(self, shard_id: str, rank: int, given: Mapping[str, int]) -> tuple[bool, int, str]:
        return self._ranks[shard_id] != rank, given.get(shard_id, 0), shard_id

    def _sources(
        self, shard_id: str, entry: LayoutEntry, window: Window
    ) -> list[tuple[Stored, Window]]:
        """All that may fill a window: nothing of another dtype.

        A tensor without a logical place is what its name says at its model-parallel place alone.
        """
        if entry.logical is not None:
            found = self._placed.get(window.name, [])
            for stored, held in found:
                _require_shape(window.name, stored, held.shape, window.shape)
            return [one for one in found if one[0].entry.dtype == entry.dtype]
        named = self._plain.get(entry.name, {})
        nearest = [one for one in related(shard_id, self._shards) if one in named]
        for one in nearest:
            _require_shape(entry.name, Stored(one, named[one]), named[one].shape, entry.shape)
        return [
            (Stored(one, named[one]), held)
            for one in nearest
            if named[one].dtype == entry.dtype
            for held in windows(named[one])
        ]


def _require_shape(
    name: str, stored: Stored, held: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    if held != wanted:
        raise LayoutMismatchError(
            f"{name} has the shape {list(wanted)}, in the snapshot ({stored.shard_id}) "
            f"{list(held)}: another model, or another padding of its vocabulary. Run with the "
            "model of the snapshot, or under another --job name; the snapshot stays in memory"
        )
