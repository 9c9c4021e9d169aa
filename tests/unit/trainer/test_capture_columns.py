"""Columns of a layout accept a state only if a copy of bytes fills it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.shard import LayoutEntry, LogicalPlace, Piece, ShardLayout, layout_differences
from megatron_ft.trainer.identity_check import PlainLayout, sharing_storage
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import dtype_name, plan_state

Live = dict[str, torch.Tensor]

SPLIT_NEVER = 1 << 62

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
PLACE = LogicalPlace(0, 4, (Piece("w", (4,), (0,), (4,), 0, (1,)),))


def layout_of(live: Live) -> ShardLayout:
    return plan_state(MappingState(live), SPLIT_NEVER)


def addresses(stored: ShardLayout, live: Live) -> list[int] | None:
    """As a restore compares them before it fills them."""
    plain = PlainLayout.of(stored)
    table = None if plain is None else plain.table(live)
    return None if table is None else table.facts[0]


@st.composite
def tensors(draw: st.DrawFn) -> Live:
    """Of a few forms; views into a common buffer may overlap, touch, or be one memory."""
    buffer = torch.zeros(40)
    found: Live = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        start, length = draw(st.integers(0, 4)) * 5, draw(st.integers(0, 4)) * 5
        made: dict[str, Callable[[], torch.Tensor]] = {
            "own": lambda dtype=dtype, shape=shape: torch.zeros(shape, dtype=dtype),
            "view": lambda start=start, length=length: buffer[start : start + length],
            "strided": lambda: torch.zeros(3, 4).t(),
            "strided view": lambda: buffer[:9].view(3, 3).t(),
            "parameter": lambda: torch.nn.Parameter(torch.zeros(5)),
        }
        found[f"t{number}"] = made[draw(st.sampled_from([*made]))]()
    return found


def changed(draw: st.DrawFn, layout: ShardLayout) -> ShardLayout:
    """The layout, or one that differs from it in one field of one entry or altogether."""
    if not layout.entries or draw(st.booleans()):
        return layout
    at = draw(st.integers(0, len(layout.entries) - 1))
    entry = layout.entries[at]
    field = draw(st.sampled_from([*LayoutEntry.__struct_fields__, "tensor_bytes", "order"]))
    if field == "tensor_bytes":
        return msgspec.structs.replace(layout, tensor_bytes=layout.tensor_bytes + 64)
    if field == "order":
        return msgspec.structs.replace(layout, entries=layout.entries[::-1])
    value = getattr(entry, field)
    other = {str: f"{value}x", int: 64, bool: not value, tuple: (2, 3), type(None): PLACE}
    one = msgspec.structs.replace(entry, **{field: other[type(value)]})
    entries = (*layout.entries[:at], one, *layout.entries[at + 1 :])
    return msgspec.structs.replace(layout, entries=entries)


@settings(max_examples=400, deadline=None)
@given(tensors(), st.data())
def test_tensors_that_pass_get_the_bytes_that_planning_would_store_of_them(
    live: Live, data: st.DataObject
) -> None:
    stored = changed(data.draw, layout_of(live))
    if (found := addresses(stored, live)) is None:
        return
    assert {entry.name for entry in stored.entries} == live.keys()
    places = []
    for entry, address in zip(stored.entries, found, strict=True):
        tensor = live[entry.name]
        assert (entry.dtype, entry.shape) == (dtype_name(tensor.dtype), tuple(tensor.shape))
        assert (entry.nbytes, address) == (tensor.nbytes, tensor.data_ptr())
        assert tensor.is_contiguous() and not entry.alias_of and not entry.is_split
        places += [(address, entry.nbytes)] if entry.nbytes else []
    assert not sharing_storage(places)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3))))
def test_tensors_of_their_own_need_no_planning(forms: list[tuple[torch.dtype, list[int]]]) -> None:
    live = {f"t{n}": torch.zeros(shape, dtype=dtype) for n, (dtype, shape) in enumerate(forms)}
    layout = layout_of(live)
    places = [live[entry.name].data_ptr() for entry in layout.entries]
    assert addresses(layout, live) == places
    plain = PlainLayout.of(layout)
    assert plain is not None
    assert plain.lengths == [live[entry.name].nbytes for entry in layout.entries]


@pytest.mark.parametrize(("shared", "apart"), [(0, True), (1, False)])
def test_tensors_that_share_a_byte_are_left_to_planning(shared: int, apart: bool) -> None:
    memory = torch.zeros(20, dtype=torch.uint8)
    live = {"a": memory[:10], "b": memory[10 - shared : 20 - shared]}
    stored = layout_of({name: tensor.clone() for name, tensor in live.items()})
    assert (addresses(stored, live) is not None) == apart


def negated() -> Live:
    return {"a": torch.zeros(10, dtype=torch.complex64).conj().imag}


def conjugated() -> Live:
    return {"a": torch.zeros(10, dtype=torch.complex64).conj()}


def transposed() -> Live:
    return {"a": torch.zeros(10, 20).t()}


def on_no_device() -> Live:
    return {"a": torch.zeros(10, device="meta")}


@pytest.mark.parametrize("make", [negated, conjugated, transposed, on_no_device])
def test_what_takes_more_than_a_copy_of_bytes_is_left_to_others(make: Callable[[], Live]) -> None:
    live = make()
    meta = any(tensor.is_meta for tensor in live.values())
    layout = layout_of({"a": torch.zeros(10)} if meta else live)
    assert addresses(layout, live) is None


def test_tensors_in_the_memory_of_others_are_left_to_planning() -> None:
    flat, tied = torch.zeros(100), torch.nn.Parameter(torch.zeros(5, 5))
    for live in ({"part": flat[10:30], "whole": flat}, {"one": tied, "two": tied}):
        layout = layout_of(live)
        assert any(entry.alias_of for entry in layout.entries)
        assert PlainLayout.of(layout) is None


def replaced(live: Live) -> None:
    live["a"] = torch.zeros(11)


def resized(live: Live) -> None:
    live["a"].resize_(20)


def reshaped(live: Live) -> None:
    live["a"].resize_(2, 5)


def reread(live: Live) -> None:
    live["a"].data = live["a"].view(torch.int32)


def grown(live: Live) -> None:
    live["c"] = torch.zeros(1)


def laid_over(live: Live) -> None:
    live["a"].data = live["b"].data


@pytest.mark.parametrize("change", [replaced, resized, reshaped, reread, grown, laid_over])
def test_what_a_load_has_changed_is_seen(change: Callable[[Live], None]) -> None:
    live = {"a": torch.zeros(10), "b": torch.zeros(10)}
    layout, plain = layout_of(live), PlainLayout.of(layout_of(live))
    assert plain is not None and (found := plain.table(live)) is not None
    assert found.still(live)
    change(live)
    assert plain.table(live) is None
    assert not found.still(live)
    assert layout_differences(layout, layout_of(live))
