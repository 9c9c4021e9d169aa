"""Places of steps and of buffers that Megatron does not save: beside a tensor that it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import Piece, TensorSpec, plan_layout
from megatron_ft.erasure.reshape_plan import Box, fill, windows
from megatron_ft.megatron.logical_map import RankTensors, _Finder, buffer_places, step_places
from megatron_ft.megatron.optimizer import Master
from megatron_ft.megatron.save_form import SaveForm

LAYERS = 8


def piece(name: str, at: tuple[int, ...], lengths: tuple[int, ...] = (LAYERS,)) -> Piece:
    """Of a parameter of 4 elements at these leading indices."""
    return Piece(name, (*lengths, 4), (*at, 0), (4,), 0, (1,))


def router(layer: int) -> Piece:
    return piece("decoder.layers.mlp.router.weight", (layer,))


def expert(layer: int, number: int) -> Piece:
    return piece("decoder.layers.mlp.experts.weight", (layer, number), (LAYERS, 2))


def buffer_piece(name: str, pieces: dict[str, tuple[Piece, ...]], shape: tuple[int, ...]) -> Piece:
    (found,) = buffer_places({name: torch.zeros(shape)}, pieces)[name].pieces
    return found


def test_a_buffer_lies_in_the_layer_of_its_neighbour() -> None:
    """The number of the layer on its rank does not matter."""
    here = "chunk1.decoder.layers.1.mlp.router"
    pieces = {
        "chunk0.decoder.layers.1.mlp.router.weight": (router(1),),
        f"{here}.weight": (router(5),),
    }
    found = buffer_piece(f"{here}.counter", pieces, (3,))
    assert found.global_name == "decoder.layers.mlp.router.counter"
    assert (found.global_shape, found.global_offset) == ((LAYERS, 3), (5, 0))
    assert (found.shape, found.stride) == ((3,), (1,))


def test_a_buffer_of_a_layer_is_not_taken_for_one_of_an_expert() -> None:
    layer = "chunk0.decoder.layers.0"
    pieces = {
        f"{layer}.mlp.experts.weight": (expert(6, 1),),
        f"{layer}.mlp.router.weight": (router(6),),
    }
    found = buffer_piece(f"{layer}.mask.seen", pieces, ())
    assert found.global_name == "decoder.layers.mask.seen"
    assert (found.global_shape, found.global_offset) == ((LAYERS,), (6,))


def test_a_buffer_without_neighbours_has_a_place_if_its_name_holds_no_number() -> None:
    pieces = {"chunk0.decoder.layers.0.mlp.router.weight": (router(6),)}
    assert buffer_piece("chunk0.rotary.table", pieces, (2, 3)).global_name == "rotary.table"
    assert buffer_piece("chunk0.rotary.table", pieces, (2, 3)).stride == (3, 1)
    assert not buffer_places({"chunk0.heads.1.table": torch.zeros(2)}, pieces)


def test_tensors_that_are_saved_and_parameters_are_left_alone() -> None:
    pieces = {"chunk0.a.weight": (router(0),)}
    weight = torch.nn.Parameter(torch.zeros(4))
    assert not buffer_places({"chunk0.a.weight": torch.zeros(4), "chunk0.a.other": weight}, pieces)


def places_of(own: tuple[Piece, ...], **kept: Any) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(4))
    inner = torch.optim.AdamW([parameter])
    inner.state[parameter] = kept
    inner._scales = {parameter: {"exp_avg": torch.zeros(())}}  # type: ignore[attr-defined]
    master = Master("optimizer0.w", parameter, parameter, inner, True)
    return step_places([master], {id(parameter): "w"}, {"w": own})


def test_steps_of_all_layers_are_one_tensor() -> None:
    """A scale is no part of one: it belongs to the elements of one rank."""
    one = torch.zeros(())
    places = places_of((router(5),), step=one, exp_avg=torch.zeros(4), found=3)
    assert [*places] == ["optimizer0.w.step"]
    spec = TensorSpec("step", "float32", 4, (), logical=places["optimizer0.w.step"])
    (window,) = windows(plan_layout([spec]).entries[0])
    assert window.name == "optimizer.state.step.decoder.layers.mlp.router.weight"
    assert (window.shape, window.box) == ((LAYERS,), Box((5,), (6,)))
    (copy,) = fill(window, [("old", window)])
    assert (copy.shape, copy.source_offset, copy.span) == ((1,), 0, (0, 1))


def test_the_step_of_a_parameter_of_several_experts_serves_each_of_them() -> None:
    places = places_of((expert(2, 0), expert(2, 1)), step=torch.zeros(()))
    spec = TensorSpec("step", "float32", 4, (), logical=places["optimizer0.w.step"])
    held = list(windows(plan_layout([spec]).entries[0]))
    assert [window.box.start for window in held] == [(2, 0), (2, 1)]
    assert {window.offset for window in held} == {0}


def test_a_step_without_leading_indices_has_no_dimensions() -> None:
    places = places_of((piece("embedding.weight", (), ()),), step=torch.zeros(()))
    (found,) = places["optimizer0.w.step"].pieces
    assert (found.global_shape, found.global_offset, found.shape) == ((), (), ())


def test_a_tensor_joined_from_padded_buckets_is_named() -> None:
    finder = _Finder(SaveForm({}, {}), RankTensors({}, {}, (), {}), {})
    with pytest.raises(ExportError, match=r"optimizer\.exp_avg .*fully-reshardable"):
        finder.find("optimizer.exp_avg", torch.empty(3, device="meta"))
