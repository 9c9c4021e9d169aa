"""Tensors put together from several shards' captured bytes: no Megatron needed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.checkpoint.export import (
    FORM_VERSION,
    CheckpointForm,
    TensorRecipe,
    dump_form,
    load_form,
)
from megatron_ft.checkpoint.source import ShardBytes
from megatron_ft.core.errors import ExportError, UndecodableError
from megatron_ft.core.objects import MAGIC, Tag
from megatron_ft.core.shard import LogicalPlace, Piece, TensorSpec, plan_layout
from megatron_ft.megatron.exporter import CapturedTensors
from megatron_ft.megatron.logical_map import place_of
from megatron_ft.trainer.addresses import AddressBook

no_deadline = settings(deadline=None, max_examples=100)
NAME, COPY = "optimizer0.w.main", "optimizer0.w.weight_copy"
PIECES = (Piece("optimizer.state.param.w", (12,), (0,), (12,), 0, (1,)),)
PLACE = place_of(PIECES)
WHOLE = TensorRecipe(NAME, "float32", (12,), 0, (1,), PLACE)


def shard(tensors: dict[str, tuple[Any, int]], split: tuple[int, int] = (0, 1)) -> ShardBytes:
    """A shard with these tensors, each with the element of the parameter where it starts.

    ``split`` is which part of each is stored, and of how many.
    """
    specs = [
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tensor.element_size(),
            tuple(tensor.shape),
            split=split,
            logical=LogicalPlace(start, 12, PIECES),
        )
        for name, (tensor, start) in tensors.items()
    ]
    layout = plan_layout(specs)
    data = np.zeros(layout.tensor_bytes, dtype=np.uint8)
    for entry in layout.entries:
        stored = tensors[entry.name][0][entry.start : entry.stop]
        raw = stored.contiguous().view(torch.uint8).numpy()
        data[entry.offset : entry.offset + entry.nbytes] = raw
    return ShardBytes(None, data, layout, b"", b"", 64, "test")  # type: ignore[arg-type]


def ranges(values: Any, bounds: Sequence[tuple[int, int]]) -> dict[str, ShardBytes]:
    return {
        f"pp0-tp0-dp{number}-ep0": shard({NAME: (values[start:stop], start)})
        for number, (start, stop) in enumerate(bounds)
        if start < stop
    }


@no_deadline
@given(st.lists(st.integers(0, 12), max_size=4), st.permutations(range(5)))
def test_ranges_of_a_parameter_make_the_whole(cuts: list[int], order: list[int]) -> None:
    values = torch.arange(12, dtype=torch.float32)
    edges = sorted([0, *cuts, 12])
    bounds = list(zip(edges, edges[1:], strict=False))
    bounds = [bounds[i] for i in order if i < len(bounds)]
    shards = ranges(values, bounds)
    assert torch.equal(CapturedTensors(shards).make(next(iter(shards)), WHOLE), values)


@no_deadline
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_a_gap_is_refused_and_an_overlap_is_not(bounds: list[tuple[int, int]]) -> None:
    values = torch.arange(12, dtype=torch.float32)
    shards = ranges(values, bounds)
    covered = {i for start, stop in bounds for i in range(start, stop)}
    if not shards:
        return
    captured = CapturedTensors(shards)
    if covered == set(range(12)):
        assert torch.equal(captured.make(next(iter(shards)), WHOLE), values)
    else:
        with pytest.raises(ExportError, match="only parts of optimizer0.w.main"):
            captured.make(next(iter(shards)), WHOLE)


def test_equal_copies_are_taken_from_the_own_stage() -> None:
    ours, theirs = torch.zeros(12), torch.ones(12)
    shards = {
        "pp0-tp0-dp0-ep0": shard({NAME: (theirs, 0)}),
        "pp0-tp1-dp0-ep0": shard({NAME: (ours, 0)}),
    }
    captured = CapturedTensors(shards)
    assert torch.equal(captured.make("pp0-tp1-dp0-ep0", WHOLE), ours)
    assert torch.equal(captured.make("pp0-tp0-dp0-ep0", WHOLE), theirs)


def test_a_weight_is_its_master_rounded_but_where_it_was_captured() -> None:
    values = torch.linspace(0, 1, 12)
    copied = torch.full((4,), 7, dtype=torch.bfloat16)
    shards = {
        "pp0-tp0-dp0-ep0": shard({NAME: (values[:8], 0), COPY: (copied, 4)}),
        "pp0-tp0-dp1-ep0": shard({NAME: (values[8:], 8)}),
    }
    made = CapturedTensors(shards).make("pp0-tp0-dp1-ep0", WHOLE._replace(dtype="bfloat16"))
    assert torch.equal(made, torch.cat([values[:4].bfloat16(), copied, values[8:].bfloat16()]))


def test_a_window_is_strided() -> None:
    values = torch.arange(12, dtype=torch.float32)
    window = WHOLE._replace(shape=(2, 2), offset=1, stride=(4, 1))
    made = CapturedTensors(ranges(values, [(0, 5), (5, 12)])).make("pp0-tp0-dp0-ep0", window)
    assert made.tolist() == [[1, 2], [5, 6]]


def test_a_range_of_a_parameter_that_replicas_split_is_that_range() -> None:
    """As two instances of a distributed optimizer keep it: the window counts from the range."""
    values = torch.arange(12, dtype=torch.float32)
    shards = {
        f"pp0-tp0-dp{number}-ep0": shard({NAME: (values[start:stop], start)}, (number // 2, 2))
        for number, (start, stop) in enumerate([(0, 5), (5, 12)] * 2)
    }
    captured = CapturedTensors(shards)
    for shard_id, length, first in (("pp0-tp0-dp0-ep0", 5, 0), ("pp0-tp0-dp3-ep0", 7, 5)):
        own = TensorRecipe(NAME, "float32", (length,), 0, (1,))
        assert captured.make(shard_id, own).tolist() == [*range(first, first + length)]
        window = own._replace(shape=(2,), offset=2, stride=(1,))
        assert captured.make(shard_id, window).tolist() == [first + 2, first + 3]


def test_padding_is_zero_and_unknown_names_are_refused() -> None:
    captured = CapturedTensors(ranges(torch.arange(12.0), [(0, 12)]))
    padding = captured.make("pp0-tp0-dp0-ep0", TensorRecipe("", "bfloat16", (3,)))
    assert padding.dtype == torch.bfloat16 and padding.tolist() == [0, 0, 0]
    with pytest.raises(ExportError, match="holds no other"):
        captured.make("pp0-tp0-dp0-ep0", TensorRecipe("other", "float32", (3,)))


def test_an_address_book_finds_what_a_view_looks_into() -> None:
    first, second = torch.zeros(4, 6), torch.zeros(10, dtype=torch.int32)
    book = AddressBook({"first": first, "second": second, "part": first[1:3]})
    assert book.find(first[3:]) == ("first", 18, (1, 6), (6, 1))
    assert book.find(first[1:2, 2:]) == ("part", 2, (1, 4), (6, 1))
    assert book.find(first[:, 1]) == ("first", 1, (4,), (6,))
    assert book.find(second[2:4]) == ("second", 2, (2,), (1,))
    assert book.find(second.view(torch.float32)[2:4]) is None
    assert book.find(torch.zeros(4)) is None
    assert AddressBook({}).find(first) is None


def test_an_address_book_knows_no_view_whose_values_are_not_its_bytes() -> None:
    plain = torch.zeros(4, dtype=torch.complex64)
    assert AddressBook({"plain": plain}).find(plain.conj()) is None
    assert AddressBook({"lazy": plain.conj()}).find(plain) is None


def test_a_form_that_is_none_is_refused() -> None:
    form = CheckpointForm(framework="megatron-core", release="0.19.2", rank=3, state=b"state")
    assert CheckpointForm.from_bytes(form.to_bytes()) == form
    with pytest.raises(ExportError, match="not taken by our integration"):
        CheckpointForm.from_bytes(b"")
    later = msgspec.structs.replace(form, version=FORM_VERSION + 1)
    with pytest.raises(ExportError, match=f"in version {FORM_VERSION + 1}, this release reads"):
        CheckpointForm.from_bytes(later.to_bytes())


def test_a_form_says_who_can_export_it() -> None:
    form = CheckpointForm(framework="deepspeed", release="0.19.8", rank=0)
    assert form.require("dp0", "deepspeed", "0.19.8") is form
    with pytest.raises(ExportError, match="trained by deepspeed, not megatron-core"):
        form.require("dp0", "megatron-core", "0.19.2")
    with pytest.raises(ExportError, match="taken with deepspeed 0.19.8, installed is 0.18.9"):
        form.require("dp0", "deepspeed", "0.18.9")
    unsaid = msgspec.structs.replace(form, problem="no reason")
    with pytest.raises(ExportError, match="could not describe shard dp0 .*no reason"):
        unsaid.require("dp0", "deepspeed", "0.19.8")


def test_a_form_keeps_what_stands_for_tensors_and_the_rest() -> None:
    tree = {"weight": torch.ones(2), "nested": [1, {"same": "text"}]}
    state = dump_form(tree, lambda part: WHOLE if isinstance(part, torch.Tensor) else None)
    assert load_form(state) == {"weight": WHOLE, "nested": [1, {"same": "text"}]}
    assert load_form(state, lambda wanted: wanted.name)["weight"] == NAME


def test_a_form_that_is_damaged_cut_off_or_of_an_unknown_class_is_said_to_be_so() -> None:
    state = dump_form({"nested": [1] * 1000}, lambda part: None)
    with pytest.raises(ExportError, match="cut off"):
        load_form(state[:-5])
    with pytest.raises(ExportError, match="cannot be read"):
        load_form(b"no form" + state)
    unknown = MAGIC + msgspec.msgpack.encode([Tag.OBJECT, "no_such_module:Thing", []])
    with pytest.raises(UndecodableError, match="no_such_module:Thing.*--import MODULE"):
        load_form(zlib.compress(unknown))
