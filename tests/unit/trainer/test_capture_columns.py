"""What columns say of a layout is what planning says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.shard import (
    LayoutEntry,
    LogicalPlace,
    Piece,
    ShardLayout,
    layout_differences,
)
from megatron_ft.trainer.identity_check import PlainLayout
from megatron_ft.trainer.plan import Planned

Live = dict[str, torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
PLACE = LogicalPlace(0, 4, (Piece("w", (4,), (0,), (4,), 0, (1,)),))


def planned(live: Live, boundary: frozenset[str] = frozenset()) -> Planned:
    return Planned(live, boundary, {}, {})


def layout_of(live: Live, boundary: frozenset[str] = frozenset()) -> ShardLayout:
    return planned(live, boundary).layout()


def addresses(stored: ShardLayout, live: Live) -> list[int] | None:
    """As a restore compares them before it fills them."""
    plain = PlainLayout.of(stored)
    return None if plain is None else plain.addresses(live)


def agrees(stored: ShardLayout, of: Planned) -> bool:
    """As a restore compares them afterwards."""
    plain = PlainLayout.of(stored)
    return plain is not None and plain.agrees(of)


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
@given(tensors(), st.booleans(), st.data())
def test_a_layout_that_passes_is_the_one_that_would_be_planned(
    live: Live, known: bool, data: st.DataObject
) -> None:
    names = st.frozensets(st.sampled_from([*live])) if live else st.just(frozenset[str]())
    boundary = data.draw(names)
    stored = changed(
        data.draw, layout_of(live, data.draw(st.sampled_from([boundary, frozenset()])))
    )
    of = planned(live, boundary)._replace(places=dict.fromkeys(live, PLACE) if known else {})
    if agrees(stored, of):
        assert layout_differences(stored, of.layout()) == ()
        assert stored.tensor_bytes == of.layout().tensor_bytes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3))))
def test_tensors_of_their_own_need_no_planning(forms: list[tuple[torch.dtype, list[int]]]) -> None:
    live = {f"t{n}": torch.zeros(shape, dtype=dtype) for n, (dtype, shape) in enumerate(forms)}
    layout = layout_of(live)
    assert agrees(layout, planned(dict(reversed(live.items()))))
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


def test_a_split_state_is_planned() -> None:
    live = {"a": torch.zeros(10)}
    layout = layout_of(live)
    assert not agrees(layout, planned(live)._replace(splits={"a": (0, 2)}))


def test_another_place_in_the_model_is_seen_where_both_sides_know_it() -> None:
    live = {"a": torch.zeros(4)}
    of = planned(live)._replace(places={"a": PLACE})
    elsewhere = of._replace(places={"a": msgspec.structs.replace(PLACE, start=4)})
    layout = of.layout()
    assert agrees(layout, of)
    assert agrees(layout, planned(live))
    assert not agrees(layout, elsewhere)


def test_an_order_that_no_plan_has_is_seen() -> None:
    live = {"a": torch.zeros(16), "b": torch.zeros(16)}
    layout = layout_of(live)
    swapped = [
        msgspec.structs.replace(entry, name=name)
        for entry, name in zip(layout.entries, ("b", "a"), strict=True)
    ]
    assert PlainLayout.of(msgspec.structs.replace(layout, entries=tuple(swapped))) is None


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
    layout = layout_of(live)
    assert agrees(layout, planned(live))
    change(live)
    assert not agrees(layout, planned(live))
    assert layout_differences(layout, layout_of(live))


def test_tensors_that_a_load_has_made_anew_may_fit_as_well() -> None:
    live = {"a": torch.zeros(10), "b": torch.zeros(10)}
    fresh = {name: torch.zeros(10) for name in live}
    assert agrees(layout_of(live), planned(fresh))
