"""The layout planner: pure, so most of it is checked on random shards."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import (
    ALIGNMENT,
    LogicalPlace,
    Piece,
    ShardLayout,
    TensorSpec,
    layout_differences,
    plan_layout,
    split_range,
)

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "bool": 1}
# Machines that run other things are slow at times; hypothesis would call that a failure.
no_deadline = settings(deadline=None, max_examples=200)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
splits = st.integers(1, 5).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@st.composite
def shards(draw: st.DrawFn) -> list[TensorSpec]:
    """Tensors with unique names, some in one memory."""
    names = draw(st.lists(st.text("abc./", min_size=1, max_size=6), unique=True, max_size=12))
    dtypes = [draw(st.sampled_from(sorted(ITEM_BYTES))) for _ in names]
    return [
        TensorSpec(
            name=name,
            dtype=dtype,
            item_bytes=ITEM_BYTES[dtype],
            shape=draw(shapes),
            address=draw(st.sampled_from([0, 4096, 4100, 4352, 8192])),
            contiguous=draw(st.booleans()),
            boundary=draw(st.booleans()),
            split=draw(splits),
        )
        for name, dtype in zip(names, dtypes, strict=True)
    ]


@given(shards())
@no_deadline
def test_owned_ranges_are_aligned_disjoint_and_inside(specs: list[TensorSpec]) -> None:
    layout = plan_layout(specs)
    end = 0
    for entry in sorted((e for e in layout.entries if not e.alias_of), key=lambda e: e.offset):
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        end = max(end, entry.offset + entry.nbytes)
    assert end <= layout.tensor_bytes and layout.tensor_bytes % ALIGNMENT == 0


@given(shards())
@no_deadline
def test_every_tensor_has_one_entry_that_holds_its_range(specs: list[TensorSpec]) -> None:
    entries = plan_layout(specs).by_name()
    assert entries.keys() == {spec.name for spec in specs}
    for spec in specs:
        entry = entries[spec.name]
        assert (entry.start, entry.stop) == split_range(spec.elements, *spec.split)
        assert entry.nbytes == (entry.stop - entry.start) * spec.item_bytes


@given(shards())
@no_deadline
def test_aliases_point_at_the_bytes_of_their_memory(specs: list[TensorSpec]) -> None:
    entries = plan_layout(specs).by_name()
    by_name = {spec.name: spec for spec in specs}
    for entry in entries.values():
        if entry.alias_of:
            owner, mine = entries[entry.alias_of], by_name[entry.name]
            assert not owner.alias_of and mine.contiguous
            assert owner.boundary or not mine.boundary
            assert entry.offset + entry.nbytes <= owner.offset + owner.nbytes
            distance = mine.address - by_name[owner.name].address
            assert entry.offset == owner.offset + (0 if owner.is_split else distance)


@given(shards(), st.randoms())
@no_deadline
def test_order_of_enumeration_and_addresses_do_not_matter(specs: list[TensorSpec], rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(specs)
    rng.shuffle(shuffled)
    assert plan_layout(shuffled).to_bytes() == plan_layout(specs).to_bytes()


@given(shards())
@no_deadline
def test_bytes_round_trip(specs: list[TensorSpec]) -> None:
    layout = plan_layout(specs)
    again = ShardLayout.from_bytes(layout.to_bytes())
    assert again == layout and again.hash() == layout.hash() and len(layout.hash()) == 32


@given(st.integers(0, 10**12), st.integers(1, 4096))
@no_deadline
def test_parts_partition_a_tensor(elements: int, parts: int) -> None:
    some = sorted({0, parts // 2, parts - 1})
    for part in some:
        start, stop = split_range(elements, part, parts)
        assert 0 <= start <= stop <= elements
        assert stop - start in (elements // parts, -(-elements // parts))
        assert part + 1 == parts or split_range(elements, part + 1, parts)[0] == stop
    assert split_range(elements, 0, parts)[0] == 0
    assert split_range(elements, parts - 1, parts)[1] == elements


def spec(name: str, shape: tuple[int, ...] = (4,), **more: object) -> TensorSpec:
    """A float32 tensor."""
    return TensorSpec(name=name, dtype="float32", item_bytes=4, shape=shape, **more)  # type: ignore[arg-type]


def test_tied_tensors_and_inner_views_take_no_bytes() -> None:
    layout = plan_layout(
        [
            spec("tied", (8, 8), address=4096),
            spec("embedding", (8, 8), address=4096),
            spec("row", (8,), address=4096 + 32),
            spec("beyond", (8, 8), address=4096 + 64),
        ]
    )
    entries = layout.by_name()
    assert entries["tied"].alias_of == entries["row"].alias_of == "embedding"
    assert entries["row"].offset == entries["embedding"].offset + 32
    assert not entries["beyond"].alias_of, "overlap without containment is stored twice"
    assert layout.tensor_bytes == 512


def test_a_split_owner_serves_only_its_twins() -> None:
    entries = plan_layout(
        [
            spec("a", (64,), address=4096, split=(1, 2)),
            spec("b", (64,), address=4096, split=(1, 2)),
            spec("part", (8,), address=4096),
        ]
    ).by_name()
    assert entries["b"].alias_of == "a" and entries["b"].start == 32
    assert not entries["part"].alias_of


def test_equal_names_are_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="'x'"):
        plan_layout([spec("x"), spec("x")])


def test_differences_name_each_tensor() -> None:
    stored = plan_layout([spec("same"), spec("shape"), spec("gone")])
    live = plan_layout([spec("same"), spec("shape", (5,)), spec("new")])
    text = "; ".join(layout_differences(stored, live))
    assert "new is not in the snapshot" in text and "gone is only in the snapshot" in text
    assert "shape is float32[5], in the snapshot float32[4]" in text
    many = plan_layout([spec(f"t{i}") for i in range(50)])
    assert layout_differences(stored, many)[-1] == "and 45 more"


def test_the_logical_map_is_part_of_the_layout() -> None:
    place = LogicalPlace(0, 64, (Piece("decoder.weight", (16, 8), (8, 0), (8, 8), 0, (8, 1)),))
    layout = plan_layout([spec("w", (8, 8), logical=place)])
    assert ShardLayout.from_bytes(layout.to_bytes()).entries[0].logical == place
    assert layout.hash() != plan_layout([spec("w", (8, 8))]).hash()
    moved = msgspec.structs.replace(place, start=8)
    differing = layout_differences(layout, plan_layout([spec("w", (8, 8), logical=moved)]))
    assert differing == ("w lies elsewhere in the unsharded model than in the snapshot",)
    unknown = plan_layout([spec("w", (8, 8))])
    assert layout_differences(layout, unknown) == layout_differences(unknown, layout) == ()


def test_a_piece_names_its_box_in_the_global_tensor() -> None:
    piece = Piece("layers.weight", (4, 6, 8), (2, 3, 0), (3, 8), 24, (8, 1))
    assert piece.box == (slice(2, 3), slice(3, 6), slice(0, 8))


@pytest.mark.parametrize("data", [b"", b"\x93\x03\x00\x90", b"garbage"])
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutMismatchError, match="release"):
        ShardLayout.from_bytes(data)


def test_sizes_of_scalars_and_empty_tensors() -> None:
    entries = plan_layout([spec("scalar", ()), spec("empty", (0, 3))]).by_name()
    assert entries["scalar"].nbytes == 4 == 4 * math.prod(())
    assert entries["empty"].nbytes == 0
