"""Where captured tensors lie in the unsharded model, from Megatron's own sharded state dict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from megatron_ft.core.shard import LogicalPlace, Piece
from megatron_ft.megatron.optimizer import MAIN, WEIGHT, Master, is_distributed, optimizer_parts
from megatron_ft.megatron.save_form import sharded_tensors
from megatron_ft.trainer import inner_optimizer
from megatron_ft.trainer.addresses import AddressBook

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


def model_places(
    tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, tuple[Piece, ...]]
) -> dict[str, LogicalPlace]:
    """Places of tensors of the model that are captured as they are."""
    return {
        name: LogicalPlace(0, tensor.numel(), pieces[name])
        for name, tensor in tensors.items()
        if name in pieces
    }


def optimizer_places(
    masters: Sequence[Master],
    optimizer: Any,
    names: Mapping[int, str],
    pieces: Mapping[str, tuple[Piece, ...]],
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
    """Endings of names of tensors with the master's shape: its own, a weight's, its state's."""
    kept = inner_optimizer.state_tensors(master.inner, master.tensor)
    same = (f".{name}" for name, value in kept.items() if _fits(value, master))
    return (MAIN, WEIGHT, *same)


def _fits(tensor: torch.Tensor, master: Master) -> bool:
    return tensor.shape == master.tensor.shape and tensor.dim() > 0


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


def place_of(pieces: Sequence[Piece]) -> tuple[str, tuple[int, ...]]:
    """What tells one local parameter from all others: its model name and global offset.

    The same for the parameter, its master and its moments, on all ranks that share it.
    """
    first = pieces[0]
    return _STATE_PREFIX.sub("", first.global_name, count=1), first.global_offset
