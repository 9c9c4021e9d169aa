"""Reshape plans: every element once, from where it is stored; a gap is named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from megatron_ft.core.shard import LogicalPlace, Piece, TensorSpec, plan_layout
from megatron_ft.erasure.reshape_plan import (
    Box,
    Copy,
    MissingRangeError,
    Window,
    fill,
    whole,
    windows,
)

Numbers = NDArray[np.int64]
Held = tuple[int, Window]


def strided(flat: Numbers, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Numbers:
    """A view of a flat array; strides in elements."""
    return as_strided(flat[offset:], shape, [8 * step for step in stride])


def tiles(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """A grid of boxes that together are the tensor, as tensor and pipeline parallelism make."""
    edges = []
    for size in shape:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
        edges.append([0, *sorted(cuts), size])
    boxes = [Box((), ())]
    for axis in edges:
        pairs = list(zip(axis, axis[1:], strict=False))
        boxes = [Box((*b.start, a), (*b.stop, e)) for b in boxes for a, e in pairs]
    return boxes


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Window, Numbers]]:
    """Stored windows of a whole tensor of this shape, and what is stored of its numbers.

    Each tile is a local parameter, whole or transposed in memory, perhaps one of two in a
    parameter, and stored in ranges as a distributed optimizer does.
    """
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    found: list[tuple[Window, Numbers]] = []
    for box in tiles(draw, shape):
        local = numbers[tuple(map(slice, box.start, box.stop))]
        order = draw(st.permutations(range(len(shape))))
        memory = np.ascontiguousarray(local.transpose(order))
        stride = tuple(memory.strides[order.index(axis)] // 8 for axis in range(len(shape)))
        ahead = draw(st.integers(0, 3))
        flat = np.concatenate([np.full(ahead, -1), memory.reshape(-1)])
        piece = Piece("weight", shape, box.start, box.shape, ahead, stride)
        cuts = draw(st.sets(st.integers(1, flat.size - 1), max_size=3)) if flat.size > 1 else set()
        edges = [0, *sorted(cuts), flat.size]
        for start, stop in zip(edges, edges[1:], strict=False):
            place = LogicalPlace(start, flat.size, (piece,))
            spec = TensorSpec("optimizer.weight", "int64", 8, (stop - start,), logical=place)
            entry = plan_layout([spec]).entries[0]
            found += [(window, flat[start:stop]) for window in windows(entry)]
    return found


shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def reshapes(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], list[tuple[Window, Numbers]], list[tuple[Window, Numbers]]]:
    shape = draw(shapes)
    copies = draw(st.integers(1, 2))
    sources = [held for _ in range(copies) for held in draw(layouts(shape))]
    return shape, draw(st.permutations(sources)), draw(layouts(shape))


def carry_out(copies: Sequence[Copy[int]], stored: Sequence[Numbers], out: Numbers) -> Numbers:
    """Carry copies out; how often each element of ``out`` was written."""
    counts = np.zeros_like(out)
    for copy in copies:
        first, stop = copy.span
        values = strided(
            stored[copy.source][first:stop],
            copy.source_offset - first,
            copy.shape,
            copy.source_stride,
        )
        strided(out, copy.offset, copy.shape, copy.stride)[...] = values
        strided(counts, copy.offset, copy.shape, copy.stride)[...] += 1
    return counts


@given(reshapes())
def test_every_element_of_any_layout_comes_once_from_any_other(
    case: tuple[tuple[int, ...], list[tuple[Window, Numbers]], list[tuple[Window, Numbers]]],
) -> None:
    shape, sources, targets = case
    stored = [numbers for _, numbers in sources]
    held = [(number, window) for number, (window, _) in enumerate(sources)]
    for window, numbers in [*targets, (whole("weight", shape), np.arange(math.prod(shape)))]:
        out = np.full_like(numbers, -1)
        counts = carry_out(fill(window, held), stored, out)
        here = strided(np.ones_like(numbers), 0, numbers.shape, (1,)) * 0
        strided(here, window.offset, window.box.shape, window.stride)[...] = 1
        assert (counts == here).all()
        assert (out[here == 1] == numbers[here == 1]).all()


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), layouts(shape))), st.data())
def test_a_range_that_nobody_holds_is_named(
    case: tuple[tuple[int, ...], list[tuple[Window, Numbers]]], data: st.DataObject
) -> None:
    shape, sources = case
    lost = data.draw(st.integers(0, len(sources) - 1))
    held = [(n, window) for n, (window, _) in enumerate(sources) if n != lost]
    with pytest.raises(MissingRangeError, match="weight") as caught:
        fill(whole("weight", shape), held)
    found = [index for box in caught.value.boxes for index in elements(box)]
    assert sorted(found) == sorted(elements(sources[lost][0].box))
    assert str(caught.value.boxes[0]) in str(caught.value)


def elements(box: Box) -> Iterator[tuple[int, ...]]:
    for index in np.ndindex(*box.shape):
        yield tuple(a + b for a, b in zip(box.start, index, strict=True))
