"""The state of a form: DeepSpeed's files with names in the place of tensors.

Names of parameters that are the same on every rank that holds a part of them, and only there.

Where captured tensors lie in the unsharded model.

ZeRO flattens parameters behind each other, pads, and cuts the result at equal places; a rank's
masters are laid out as its part of the weights is.  Parameters are views of those weights, so
addresses say which range of which parameter came to lie where, whatever the optimizer.
(DeepSpeed's own map, ``_hp_mapping``, is wrong with ``round_robin_gradients`` in 0.19.8.)

What DeepSpeed itself would save, asked for once: the trees that it hands to an engine for files.

No file is written, no tensor is copied, nothing is communicated.  Everything about names and
formats is DeepSpeed's own answer, so nothing of it is repeated here.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from deepspeed_ext.optimizers.view import OptimizerView
from megatron_ft.checkpoint import export as form
from megatron_ft.checkpoint.export import TensorRecipe
from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import LogicalPlace, Piece
from megatron_ft.trainer.addresses import AddressBook, Window
from megatron_ft.trainer.plan import dtype_name

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
        """The global name of what is called ``name`` in ``engine.module``."""
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
    """By the name of each of DeepSpeed's MoE layers the number of this rank's first expert."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    return {
        name: groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
        for name, layer in module.named_modules()
        if isinstance(layer, MoE)
    }


MASTER, WEIGHT = "fp32", "weight"
"""Kinds of state: masters as in DeepSpeed's universal checkpoints, weights captured beside them.

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
    parts = sorted(((_Memory.of(part), p, start) for p, start, part in _parts(view)), key=_first)
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


def _first(part: tuple[_Memory, torch.Tensor, int]) -> int:
    return part[0].first


def _parts(view: OptimizerView) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Each parameter with what of it is in memory here, and where in it that starts."""
    for parameter in view.owned():
        if hasattr(parameter, "ds_id"):
            partition: Any = parameter
            size = partition.partition_numel()
            start = torch.distributed.get_rank(partition.ds_process_group) * size
            # What is behind the parameter's end is padding.
            held = partition.ds_tensor.view(-1)[: max(0, partition.ds_numel - start)]
        else:
            start, held = 0, parameter.detach()
        if held.numel() and held.is_contiguous():
            yield parameter, start, held


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
    ``layers.0.weight/fp32``, ``layers.0.weight/exp_avg``.
    """
    names = ParameterNames(engine)
    kinds = _kinds(view, captured)
    pieces: dict[str, list[Piece]] = {}
    for fragment in fragments(view):
        parameter = names.of(engine.param_names[fragment.parameter])
        for captured_name, kind in kinds[fragment.master].items():
            piece = _piece(fragment, f"{parameter}/{kind}")
            pieces.setdefault(captured_name, []).append(piece)
    found = {name: _place(captured[name], parts) for name, parts in pieces.items()}
    return {**_model_places(engine.module, captured, names), **found}


def _kinds(view: OptimizerView, captured: Mapping[str, torch.Tensor]) -> dict[str, dict[str, str]]:
    """By master: the captured tensors that are laid out as it is, and of what kind they are."""
    found: dict[str, dict[str, str]] = {}
    for master in view.masters():
        alike = {
            name: name.removeprefix(f"{master.name}/")
            for name, tensor in captured.items()
            if name.startswith(f"{master.name}/") and tensor.shape == master.tensor.shape
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
    """Parameters and buffers that are captured themselves, whole."""
    live = [*module.named_parameters(), *module.named_buffers()]
    known = {_Memory.of(tensor): name for name, tensor in live if tensor.numel()}
    found = {}
    for name, tensor in captured.items():
        own = known.get(_Memory.of(tensor))
        if own is not None:
            whole = Fragment(tensor, tensor.numel(), 0, tensor.numel(), name, 0)
            found[name] = _place(tensor, [_piece(whole, names.of(own))])
    return found


EXTRA_STATE = "_extra_state"
"""What torch adds to a module's name for what it keeps outside parameters and buffers."""


def describe(engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]) -> bytes:
    """Record what ``engine`` would save, with the names of ``captured`` tensors in it.

    Raises ExportError naming what DeepSpeed would save and no snapshot holds.
    """
    describer = _Describer(engine, view, captured)
    files = record(engine)
    for name, tree in files.items():
        _check(name, tree)
    return msgspec.msgpack.encode(
        {name: form.dump(tree, describer.inside(name)) for name, tree in files.items()}
    )


def _check(name: str, tree: Any) -> None:
    """ExportError for what changes in training and is not set anew by export/values.py."""
    if tree.get("data_sampler") is not None:
        raise ExportError("the state of a curriculum's data sampler cannot be exported yet")
    whole = "global_steps" in tree
    extra = [key for key in tree if str(key).endswith(EXTRA_STATE) and not whole]
    if extra:
        raise ExportError(f"{extra[0]} in {name}: extra state in such files cannot be exported yet")


def files_of(state: bytes) -> dict[str, bytes]:
    """What ``form.dump`` gave of each file, by its name, from a form's state."""
    return msgspec.msgpack.decode(state, type=dict[str, bytes]) if state else {}


class _Describer:
    """Finds out from what captured tensors a tensor of a checkpoint can be made."""

    def __init__(
        self, engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]
    ) -> None:
        self._captured = AddressBook({name: t.detach() for name, t in captured.items()})
        self._global_names = ParameterNames(engine)
        parameters = dict(engine.module.named_parameters())
        self._parameters = AddressBook(parameters)
        self._partitioned = {n for n, p in parameters.items() if hasattr(p, "ds_id")}
        owned = {id(parameter) for parameter in view.owned()}
        self._owned = {name for name, p in parameters.items() if id(p) in owned}

    def inside(self, file: str) -> Callable[[Any], TensorRecipe | None]:
        """A function for ``form.dump`` of this file."""

        def describe(part: Any) -> TensorRecipe | None:
            return self._of(file, part) if isinstance(part, torch.Tensor) else None

        return describe

    def _of(self, file: str, tensor: torch.Tensor) -> TensorRecipe:
        if not tensor.numel():
            return _wanted("", tensor, None)
        window = self._captured.find(tensor.detach())
        if window is not None:
            return _wanted(window.name, tensor, window)
        window = self._parameters.find(tensor.detach())
        if window is None or window.name not in self._owned | self._partitioned:
            raise ExportError(
                f"no snapshot holds a tensor of {list(tensor.shape)}, {dtype_name(tensor.dtype)}, "
                f"which DeepSpeed saves in {file}"
            )
        if window.name in self._partitioned:
            # Gathered for now; DeepSpeed lets go of it before it saves.
            return TensorRecipe("", dtype_name(tensor.dtype), (0,), stride=(1,))
        return _wanted(MASTER, tensor, window, (self._global_names.of(window.name), ()))


def _wanted(
    name: str,
    tensor: torch.Tensor,
    window: Window | None,
    place: tuple[str, tuple[int, ...]] | None = None,
) -> TensorRecipe:
    return TensorRecipe(
        name,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        window.offset if window is not None else 0,
        tuple(tensor.stride()),
        place,
        tensor.requires_grad,
    )


ROOT, TAG = "root", "tag"


def record(engine: Any) -> dict[str, Any]:
    """The content of each file that this rank would save, by its name in the checkpoint.

    The trees hold live tensors and objects.  Whatever DeepSpeed raises comes through.
    """
    recorder = _Recorder(engine.checkpoint_engine)
    stand_ins = {
        "checkpoint_engine": recorder,
        "_copy_recovery_script": lambda _folder: None,
        "_get_param_fragment_func": _frozen_fragment,
    }
    with _replaced(engine, stand_ins), _NoCopies():
        save = engine._save_moe_checkpoint if engine.has_moe_layers else engine._save_checkpoint
        save(ROOT, TAG)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(ROOT, TAG)
    return recorder.files


def _frozen_fragment(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter that the optimizer does not own, where it is."""
    held = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
    return held.detach()  # type: ignore[no-any-return]


class _Recorder:
    """Stands in for DeepSpeed's CheckpointEngine and keeps what it is asked to save."""

    def __init__(self, real: Any) -> None:
        self.files: dict[str, Any] = {}
        self._real = real

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the tree under its path relative to the checkpoint's folder."""
        self.files[os.path.relpath(path, os.path.join(ROOT, TAG))] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As the engine that saves later."""
        return bool(self._real.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """As the engine that saves later: it decides what DeepSpeed copies, tuples included."""
        return bool(self._real.preserves_storage_sharing())


class _NoCopies(TorchFunctionMode):
    """Returns the tensor for a call that copies it: a copy looks the same in a file."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        moved = func is torch.Tensor.to and len(args) == 2 and isinstance(args[1], torch.device)
        if moved or func in (torch.Tensor.clone, torch.clone, torch.Tensor.cpu):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced(holder: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of one object replaced for a while."""
    before = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    vars(holder).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(holder)[name]
        vars(holder).update(before)
