"""Places of captured tensors in the unsharded model, under names that every rank would give.

ZeRO flattens parameters behind each other, pads, and cuts the result at equal places; a rank's
masters are laid out as its part of the weights is.  Parameters are views of those weights, so
addresses say which range of which parameter came to lie where, whatever the optimizer.
(DeepSpeed's own map, ``_hp_mapping``, is wrong with ``round_robin_gradients`` in 0.19.8.)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed_ext.optimizers.view import OptimizerView
from megatron_ft.core.shard import LogicalPlace, Piece
from megatron_ft.trainer.optimizer_classes import sharding_of

_EXPERT = re.compile(r"(\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)")


class ParameterNames:
    """Global names of an engine's parameters and buffers.

    DeepSpeed's own names, but an expert has its number in the whole layer (as in DeepSpeed's
    expert files), and under tensor parallelism the rank comes first, as each holds another
    part: ``mp_rank_01.layers.0.weight``.
    """

    def __init__(self, engine: Any) -> None:
        self._prefix = _tensor_parallel_prefix(engine)
        self._first_experts = _first_experts(engine.module)

    def of(self, name: str) -> str:
        layer = _EXPERT.search(name)
        if layer is not None:
            number = self._first_experts.get(name[: layer.start()], 0) + int(layer.group(2))
            name = f"{name[: layer.start(2)]}{number}{name[layer.end(2) :]}"
        return self._prefix + name


def _tensor_parallel_prefix(engine: Any) -> str:
    if engine.mp_world_size <= 1:
        return ""
    # In a pipeline the model-parallel rank counts stages too; names tell those apart already.
    mpu = engine.mpu
    rank = getattr(mpu, "get_slice_parallel_rank", mpu.get_model_parallel_rank)()
    size = getattr(mpu, "get_slice_parallel_world_size", mpu.get_model_parallel_world_size)()
    return f"mp_rank_{rank:02d}." if size > 1 else ""


def _first_experts(module: Any) -> dict[str, int]:
    """Number of this rank's first expert, by the name of each of DeepSpeed's MoE layers."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    return {
        name: groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
        for name, layer in module.named_modules()
        if isinstance(layer, MoE)
    }


MASTER, WEIGHT = "fp32", "weight"
"""Kinds of state: masters as in DeepSpeed's universal checkpoints, and captured weights.

Moments have the names that the inner optimizer gives them."""


class Fragment(NamedTuple):
    """Elements ``start`` and following of a flattened parameter of ``elements``.

    ``numel`` of them are elements ``offset`` and following of the master called ``master``.
    """

    parameter: torch.Tensor
    elements: int
    start: int
    numel: int
    master: str
    offset: int


class _Memory(NamedTuple):
    """Contiguous elements: bytes ``first`` to ``last``, of ``item`` bytes each."""

    first: int
    last: int
    item: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        first = tensor.data_ptr()
        return cls(first, first + tensor.nbytes, tensor.element_size())


def fragments(view: OptimizerView) -> Iterator[Fragment]:
    """The parts of this rank's masters, in their order, without padding."""
    parts = sorted(
        ((_Memory.of(part), p, start) for p, start, part in _parts(view)),
        key=lambda part: part[0].first,
    )
    starts = [memory.first for memory, *_ in parts]
    for master, memory in _laid_out(view):
        # The part before may reach into this memory.
        for own, parameter, start in parts[max(0, bisect_right(starts, memory.first) - 1) :]:
            if own.first >= memory.last:
                break
            first, last = max(own.first, memory.first), min(own.last, memory.last)
            if first < last:
                yield Fragment(
                    parameter,
                    getattr(parameter, "ds_numel", parameter.numel()),
                    start + (first - own.first) // own.item,
                    (last - first) // own.item,
                    master,
                    (first - memory.first) // own.item,
                )


def _parts(view: OptimizerView) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Each parameter with what of it is in memory here, and where in it that starts."""
    for parameter in view.owned():
        start, held = _held(parameter)
        if held.numel() and held.is_contiguous():
            yield parameter, start, held


def _held(parameter: Any) -> tuple[int, torch.Tensor]:
    """Start in a parameter, and memory, of the part that this rank holds, without padding."""
    if not hasattr(parameter, "ds_id"):
        return 0, parameter.detach()
    start = torch.distributed.get_rank(parameter.ds_process_group) * parameter.partition_numel()
    # Memory behind the parameter's end is padding.
    return start, parameter.ds_tensor.view(-1)[: max(0, parameter.ds_numel - start)]


def _laid_out(view: OptimizerView) -> Iterator[tuple[str, _Memory]]:
    """Names of masters with the memory of the weights that are laid out as they are."""
    weights = {weight.master.data_ptr(): weight.tensor for weight in view.weights()}
    for master in view.masters():
        # Where there are none, the master is the weight.
        weight = weights.get(master.tensor.data_ptr(), master.tensor)
        assert weight.numel() == master.tensor.numel()
        yield master.name, _Memory.of(weight)


def places(
    engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]
) -> dict[str, LogicalPlace]:
    """Places of captured tensors, by their names; a tensor of which nothing is known has none.

    Pieces are ranges of flattened parameters.  Their global names are a parameter's, with the
    kind of state behind it, as the folders and files of DeepSpeed's universal checkpoints:
    ``layers.0.weight/fp32``, ``layers.0.weight/exp_avg``.  Single numbers, such as steps, are the
    same on all ranks.
    """
    names = ParameterNames(engine)
    kinds = _kinds(view, captured)
    # Of a partition that is all padding, the place has no pieces.
    pieces: dict[str, list[Piece]] = {name: [] for alike in kinds.values() for name in alike}
    for fragment in fragments(view):
        parameter = names.of(engine.param_names[fragment.parameter])
        for captured_name, kind in kinds[fragment.master].items():
            piece = _piece(fragment, f"{parameter}/{kind}")
            pieces.setdefault(captured_name, []).append(piece)
    found = {name: _place(captured[name], parts) for name, parts in pieces.items()}
    numbers = _number_places(view, captured)
    return {**_model_places(engine.module, captured, names), **numbers, **found}


def _number_places(
    view: OptimizerView, captured: Mapping[str, torch.Tensor]
) -> dict[str, LogicalPlace]:
    """Places of the tensors other than moments that all ranks hold alike: numbers, for most."""
    found = {}
    for master in view.masters():
        for key in master.inner.state[master.parameter]:
            tensor, way = captured.get(f"{master.name}/{key}"), sharding_of(master.inner, key)
            if tensor is not None and way in ("scalar", "replicated"):
                whole = (tensor.numel(),)
                piece = Piece(f"{view.counted_as(master)}/{key}", whole, (0,), whole, 0, (1,))
                found[f"{master.name}/{key}"] = _place(tensor, [piece])
    return found


def _kinds(view: OptimizerView, captured: Mapping[str, torch.Tensor]) -> dict[str, dict[str, str]]:
    """Captured tensors that are laid out as a master is, with their kinds, by master."""
    found: dict[str, dict[str, str]] = {}
    for master in view.masters():
        alike = {
            f"{master.name}/{key}": key
            for key in master.inner.state[master.parameter]
            if (tensor := captured.get(f"{master.name}/{key}")) is not None
            and sharding_of(master.inner, key) == "elementwise"
            and tensor.shape == master.tensor.shape
        }
        alike[f"{master.name}/master"] = MASTER
        weights = (w for w in view.weights() if w.master.data_ptr() == master.tensor.data_ptr())
        alike.update({weight.name: WEIGHT for weight in weights if weight.name in captured})
        found[master.name] = alike
    return found


def _piece(fragment: Fragment, name: str) -> Piece:
    return Piece(
        global_name=name,
        global_shape=(fragment.elements,),
        global_offset=(fragment.start,),
        shape=(fragment.numel,),
        offset=fragment.offset,
        stride=(1,),
    )


def _place(tensor: torch.Tensor, pieces: Iterable[Piece]) -> LogicalPlace:
    ordered = sorted(pieces, key=lambda piece: (piece.offset, piece.global_name))
    return LogicalPlace(0, tensor.numel(), tuple(ordered))


def _model_places(
    module: Any, captured: Mapping[str, torch.Tensor], names: ParameterNames
) -> dict[str, LogicalPlace]:
    """Parameters and buffers that are captured themselves: whole, or this rank's partition."""
    known = {}
    for own, live in [*module.named_parameters(), *module.named_buffers()]:
        partition = getattr(live, "ds_tensor", live)
        if partition.numel():
            known[_Memory.of(partition)] = own, live
    found = {}
    for name, tensor in captured.items():
        if _Memory.of(tensor) in known:
            own, live = known[_Memory.of(tensor)]
            (start, held), elements = _held(live), getattr(live, "ds_numel", live.numel())
            part = Fragment(live, elements, start, held.numel(), name, 0)
            found[name] = _place(tensor, [_piece(part, names.of(own))] if held.numel() else [])
    return found
