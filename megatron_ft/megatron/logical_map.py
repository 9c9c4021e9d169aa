"""Describes a rank once, when training starts, so that others can read its snapshots without it.

The logical map says where captured tensors lie in the unsharded model.  The checkpoint form says
what Megatron itself would save: its state dict with names in the place of tensors.  Both come from
one sharded state dict of Megatron's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from megatron_ft.checkpoint.export import TensorRecipe, dump_form
from megatron_ft.checkpoint.framework_state import Description, described
from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import LogicalPlace, Piece, row_major
from megatron_ft.megatron import save_form
from megatron_ft.megatron.optimizer import MAIN, WEIGHT, Master, is_distributed, optimizer_parts
from megatron_ft.megatron.save_form import SaveForm, meta_key, sharded_tensors
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.addresses import AddressBook, TensorWindow
from megatron_ft.trainer.optimizer_classes import sharding_of
from megatron_ft.trainer.plan import dtype_name

Pieces = Mapping[str, tuple[Piece, ...]]
"""Pieces of tensors by name."""

_STATE_PREFIX = re.compile(r"optimizer\.state\.[^.]+\.")


def model_pieces(
    tree: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of each model tensor (parameters and buffers, by name), in order of offset.

    ``tree`` is a state dict of save_form.build; its ShardedTensors are views of the live
    tensors.  A tensor that Megatron would not save (a buffer that is not persistent) has none.
    """
    book = AddressBook(tensors)
    found: dict[str, list[Piece]] = {}
    models = [value for key, value in tree.items() if key.startswith("model")]
    for saved in sharded_tensors(models):
        window = book.find(saved.data.detach()) if saved.data is not None else None
        if window is not None:
            piece = Piece(
                global_name=saved.key,
                global_shape=tuple(saved.global_shape),
                global_offset=tuple(saved.global_offset),
                shape=window.shape,
                offset=window.offset,
                stride=window.stride,
            )
            found.setdefault(window.name, []).append(piece)
    return {name: tuple(sorted(pieces, key=_order)) for name, pieces in found.items()}


def _order(piece: Piece) -> tuple[int, str]:
    return piece.offset, piece.global_name


def model_places(tensors: Mapping[str, torch.Tensor], pieces: Pieces) -> dict[str, LogicalPlace]:
    return {
        name: LogicalPlace(0, tensor.numel(), pieces[name])
        for name, tensor in tensors.items()
        if name in pieces
    }


def optimizer_places(
    masters: Sequence[Master],
    optimizer: Any,
    names: Mapping[int, str],
    pieces: Pieces,
) -> dict[str, LogicalPlace]:
    """Places of masters and moments: those of their parameter, from where their range starts.

    Their global names are those of Megatron's own optimizer checkpoints, for example
    ``optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight``; an fp32 parameter
    that the optimizer updates directly keeps its own.  ``names`` maps ``id`` of a parameter
    to its name.
    """
    places: dict[str, LogicalPlace] = {}
    parts = {id(part.optimizer): part for part in optimizer_parts(optimizer)}
    for master in masters:
        part = parts[id(master.inner)]
        own = pieces.get(names[id(master.parameter)], ())
        if own:
            start = _start(part, master)
            elements = master.parameter.numel()
            for kind in _kinds(master):
                renamed = _renamed(own, _prefix(part, master, kind))
                places[master.name + kind] = LogicalPlace(start, elements, renamed)
    return places


def _kinds(master: Master) -> Iterable[str]:
    kept = master_tensors.state_tensors(master.inner, master.tensor)
    same = (
        f".{name}"
        for name, value in kept.items()
        if sharding_of(master.inner, name) == "elementwise"
        and value.shape == master.tensor.shape
        and value.dim() > 0
    )
    return (MAIN, WEIGHT, *same)


def _start(part: Any, master: Master) -> int:
    """The first element of the flattened parameter that this rank's master stands for."""
    if not is_distributed(part):
        return 0
    return int(part._get_model_param_range_map(master.parameter)["param"].start)


def _prefix(part: Any, master: Master, kind: str) -> str:
    if kind == WEIGHT:
        return ""
    if kind != MAIN:
        return f"optimizer.state{kind}."
    if is_distributed(part):
        return "optimizer.state.param."
    return "" if master.tensor is master.parameter else "optimizer.state.fp32_param."


def _renamed(pieces: Iterable[Piece], prefix: str) -> tuple[Piece, ...]:
    return tuple(
        msgspec.structs.replace(piece, global_name=prefix + piece.global_name) for piece in pieces
    )


# --- Tensors that Megatron's checkpoints do not hold as they are ----------------------------------
#
# The ``step`` that torch's optimizers keep for each parameter, and buffers that are not persistent.
# Each belongs to a tensor that Megatron does describe: under its own global name, at the leading
# indices (layer, expert) of the other.


def step_places(
    masters: Sequence[Master], names: Mapping[int, str], pieces: Pieces
) -> dict[str, LogicalPlace]:
    """Places of what the optimizer keeps for each parameter as a whole: steps, for most.

    The steps of all layers are one global tensor, for example
    ``optimizer.state.step.decoder.layers.mlp.linear_fc1.weight`` with one element per layer.
    Each data-parallel rank that owns a part of a parameter holds the same step for it.
    Scales have no place: each belongs to the elements that one rank owns.  ``names`` maps ``id``
    of a parameter to its name.
    """
    places: dict[str, LogicalPlace] = {}
    for master in masters:
        own = pieces.get(names[id(master.parameter)], ())
        kept = master_tensors.state_tensors(master.inner, master.tensor)
        for kind, value in kept.items():
            way = sharding_of(master.inner, kind)
            if own and (way == "replicated" or (way == "scalar" and not value.dim())):
                found = _named(own, f"optimizer.state.{kind}.", tuple(value.shape))
                places[f"{master.name}.{kind}"] = LogicalPlace(0, value.numel(), found)
    return places


def _named(own: Sequence[Piece], prefix: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """One piece for each leading index, all of the same element: a parameter may hold experts."""
    made = {
        _leading(piece): _at_indices_of(piece, prefix + piece.global_name, shape) for piece in own
    }
    return tuple(made.values())


def buffer_places(tensors: Mapping[str, torch.Tensor], pieces: Pieces) -> dict[str, LogicalPlace]:
    """Places of buffers that Megatron does not save, whole on each rank.

    They are constants, or counters that Megatron sets to zero before an iteration ends
    (``reset_model_temporary_tensors``), so ranks that hold a layer hold equal ones.
    """
    places: dict[str, LogicalPlace] = {}
    for name, tensor in tensors.items():
        if name in pieces or isinstance(tensor, torch.nn.Parameter):
            continue
        piece = _by_neighbour(name, tuple(tensor.shape), pieces)
        if piece is not None:
            places[name] = LogicalPlace(0, tensor.numel(), (piece,))
    return places


def _by_neighbour(name: str, shape: tuple[int, ...], pieces: Pieces) -> Piece | None:
    """The place of a tensor by that of another in the smallest module that holds both.

    ``chunk0.decoder.layers.1.mlp.router.counter`` belongs to
    ``chunk0.decoder.layers.1.mlp.router.weight``.
    """
    for scope in _scopes(name):
        neighbours = [
            (own[0], (f".{own[0].global_name}").removesuffix(other[len(scope) :]))
            for other, own in pieces.items()
            if other.startswith(f"{scope}.")
            and f".{own[0].global_name}".endswith(other[len(scope) :])
        ]
        if neighbours:
            piece, prefix = min(neighbours, key=lambda found: len(_leading(found[0])))
            return _at_indices_of(piece, (prefix + name[len(scope) :]).removeprefix("."), shape)
    inner = name.partition(".")[2]
    if any(part.isdigit() for part in inner.split(".")):
        return None  # Its layer would be known by a number of this rank's only.
    return Piece(inner, shape, (0,) * len(shape), shape, 0, row_major(shape))


def _scopes(name: str) -> Iterator[str]:
    """The modules that hold ``name``, the smallest first, down to its chunk."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _leading(piece: Piece) -> tuple[int, ...]:
    return piece.global_offset[: len(piece.global_shape) - len(piece.shape)]


def _at_indices_of(piece: Piece, name: str, shape: tuple[int, ...]) -> Piece:
    """A whole tensor of ``shape`` at the leading indices of ``piece``."""
    leading = _leading(piece)
    return Piece(
        global_name=name,
        global_shape=(*piece.global_shape[: len(leading)], *shape),
        global_offset=(*leading, *(0 for _ in shape)),
        shape=shape,
        offset=0,
        stride=row_major(shape),
    )


# --- The checkpoint form -------------------------------------------------------------------------


def place_of(pieces: Sequence[Piece]) -> tuple[str, tuple[int, ...]]:
    """Key that tells one local parameter from all others: its model name and global offset.

    The same for the parameter, its master and its moments, on all ranks that share it.
    """
    first = pieces[0]
    return _STATE_PREFIX.sub("", first.global_name, count=1), first.global_offset


class RankTensors(NamedTuple):
    """Tensors that a form refers to.

    ``captured`` are the tensors of a snapshot, ``model`` the parameters and buffers of the
    model, both by name.  ``masters`` are those of this rank; ``master_names`` gives, for
    each parameter's name, the prefix of the captured tensors that it follows from.
    """

    captured: Mapping[str, torch.Tensor]
    model: Mapping[str, torch.Tensor]
    masters: tuple[Master, ...]
    master_names: Mapping[str, str]


def describe(saved: SaveForm, tensors: RankTensors, pieces: Pieces) -> bytes:
    """Encode a state dict with names in the place of tensors.

    ``pieces`` says where each parameter lies in the unsharded model.

    Raises ExportError naming a tensor that Megatron would save and no snapshot holds, and
    UnencodableError naming a value that no snapshot can hold.
    """
    finder = _Finder(saved, tensors, pieces)
    empty = set(_padding(saved.tree))
    wanted: dict[int, TensorRecipe] = {}
    for leaf in sharded_tensors(saved.tree):
        data = leaf.data
        if id(data) in empty or not data.numel():
            wanted[id(data)] = TensorRecipe("", dtype_name(data.dtype), tuple(data.shape))
        else:
            wanted[id(data)] = finder.find(leaf.key, data)
    # The tree keeps its tensors alive, so no other object has one of these ids.
    saving = (_persistent(saved.tree), saved.content_metadata)
    return dump_form(saving, lambda part: wanted.get(id(part)))


class _Finder:
    """Finds out from what a tensor of a checkpoint can be made."""

    def __init__(
        self,
        saved: SaveForm,
        tensors: RankTensors,
        pieces: Pieces,
    ) -> None:
        self._gathered = saved.gathered
        self._captured = AddressBook(tensors.captured)
        self._model = AddressBook(tensors.model)
        self._names = {id(tensor): name for name, tensor in tensors.model.items()}
        self._master_names = tensors.master_names
        self._pieces = pieces

    def find(self, key: str, data: torch.Tensor) -> TensorRecipe:
        if data.is_meta:
            return self._find_gathered(key, data)
        window = self._captured.find(data.detach())
        if window is not None:
            return TensorRecipe(window.name, dtype_name(data.dtype), *_geometry(window))
        window = self._model.find(data.detach())
        if window is None or window.name not in self._master_names:
            raise ExportError(f"no snapshot holds {key}, which Megatron's checkpoints contain")
        return self._of_parameter(window, MAIN, data.dtype)

    def _of_parameter(self, window: TensorWindow, kind: str, dtype: torch.dtype) -> TensorRecipe:
        name = self._master_names[window.name] + kind
        place = place_of(self._pieces[window.name])
        return TensorRecipe(name, dtype_name(dtype), *_geometry(window), place)

    def _find_gathered(self, key: str, data: torch.Tensor) -> TensorRecipe:
        if meta_key(data) not in self._gathered:
            raise ExportError(
                f"Megatron joins {key} from several padded gradient buckets "
                "(--dist-ckpt-optim-fully-reshardable), and what it saves then it does not load "
                "right itself: train without this flag, or with fewer buckets"
            )
        buffer, kind = self._gathered[meta_key(data)]
        position = data.storage_offset()
        for parameter, (start, end, *_) in buffer.param_index_map.items():
            if start <= position < end:
                name, shape = self._names[id(parameter)], tuple(data.shape)
                window = TensorWindow(name, position - start, shape, tuple(data.stride()))
                return self._of_parameter(
                    window, MAIN if kind == "param" else f".{kind}", data.dtype
                )
        raise ExportError(f"element {position} of a gradient buffer belongs to no parameter")


def _geometry(window: TensorWindow) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    return window.shape, window.offset, window.stride


def _padding(tree: Any) -> Iterator[int]:
    """``id`` of tensors that only fill a gap between parameters in a gradient bucket."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(tree, dict):
        mark = tree.get("padding")
        if isinstance(mark, LocalNonpersistentObject) and mark.unwrap() is True:
            yield from (id(leaf.data) for leaf in sharded_tensors(tree))
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _padding(value)


def _persistent(tree: Any) -> Any:
    """The tree with empty shells where Megatron marks what must not be saved."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(tree, LocalNonpersistentObject):
        return LocalNonpersistentObject(None)
    if isinstance(tree, dict):
        return {key: _persistent(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_persistent(value) for value in tree]
    return tree


FRAMEWORK = "megatron-core"


def describe_rank(
    args: Any, model: Sequence[Any], optimizer: Any, scheduler: Any, tensors: RankTensors
) -> Description:
    """Describe the rank; see ``described``.  Collective as save_form.build is."""

    def describe_into(places: dict[str, LogicalPlace]) -> bytes:
        saved = save_form.build(model, optimizer, scheduler, args)
        pieces = model_pieces(saved.tree, tensors.model)
        places.update(_places(pieces, optimizer, tensors))
        return describe(saved, tensors, pieces)

    return described(FRAMEWORK, megatron_version(), describe_into)


def _places(pieces: Pieces, optimizer: Any, tensors: RankTensors) -> dict[str, LogicalPlace]:
    names = {id(tensor): name for name, tensor in tensors.model.items()}
    buffers = tensors.captured.keys() & tensors.model.keys()
    return {
        **model_places(tensors.captured, pieces),
        **buffer_places({name: tensors.model[name] for name in buffers}, pieces),
        **step_places(tensors.masters, names, pieces),
        **optimizer_places(tensors.masters, optimizer, names, pieces),
    }


def megatron_version() -> str:
    """The release of megatron-core, without the commit that a checkout appends."""
    import megatron.core

    return str(megatron.core.__version__).partition("+")[0]
