"""The state of a form: Megatron's state dict with names in the place of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megatron_ft.checkpoint import form
from megatron_ft.checkpoint.form import Wanted
from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import Piece
from megatron_ft.megatron.logical_map import place_of
from megatron_ft.megatron.optimizer import MAIN, Master
from megatron_ft.megatron.save_form import SaveForm, meta_key, sharded_tensors
from megatron_ft.trainer.addresses import AddressBook, Window
from megatron_ft.trainer.plan import dtype_name


class RankTensors(NamedTuple):
    """What a form refers to.

    ``captured`` are the tensors of a snapshot, ``model`` the parameters and buffers of the
    model, both by name.  ``masters`` are those of this rank; ``master_names`` gives, for
    each parameter's name, the prefix of the captured tensors that it follows from.
    """

    captured: Mapping[str, torch.Tensor]
    model: Mapping[str, torch.Tensor]
    masters: tuple[Master, ...]
    master_names: Mapping[str, str]


def describe(
    saved: SaveForm, tensors: RankTensors, pieces: Mapping[str, tuple[Piece, ...]]
) -> bytes:
    """Encode a state dict with names in the place of tensors.

    ``pieces`` says where each parameter lies in the unsharded model.

    Raises ExportError naming a tensor that Megatron would save and no snapshot holds, and
    UnencodableError naming a value that no snapshot can hold.
    """
    finder = _Finder(saved, tensors, pieces)
    empty = set(_padding(saved.tree))
    wanted: dict[int, Wanted] = {}
    for leaf in sharded_tensors(saved.tree):
        data = leaf.data
        if id(data) in empty or not data.numel():
            wanted[id(data)] = Wanted("", dtype_name(data.dtype), tuple(data.shape))
        else:
            wanted[id(data)] = finder.find(leaf.key, data)
    # The tree keeps its tensors alive, so no other object has one of these ids.
    saving = (_persistent(saved.tree), saved.content_metadata)
    return form.dump(saving, lambda part: wanted.get(id(part)))


class _Finder:
    """Finds out from what a tensor of a checkpoint can be made."""

    def __init__(
        self,
        saved: SaveForm,
        tensors: RankTensors,
        pieces: Mapping[str, tuple[Piece, ...]],
    ) -> None:
        self._gathered = saved.gathered
        self._captured = AddressBook(tensors.captured)
        self._model = AddressBook(tensors.model)
        self._names = {id(tensor): name for name, tensor in tensors.model.items()}
        self._master_names = tensors.master_names
        self._pieces = pieces

    def find(self, key: str, data: torch.Tensor) -> Wanted:
        if data.is_meta:
            return self._find_gathered(data)
        window = self._captured.find(data.detach())
        if window is not None:
            return Wanted(window.name, dtype_name(data.dtype), *_geometry(window))
        window = self._model.find(data.detach())
        if window is None or window.name not in self._master_names:
            raise ExportError(f"no snapshot holds {key}, which Megatron's checkpoints contain")
        return self._of_parameter(window, MAIN, data.dtype)

    def _of_parameter(self, window: Window, kind: str, dtype: torch.dtype) -> Wanted:
        name = self._master_names[window.name] + kind
        place = place_of(self._pieces[window.name])
        return Wanted(name, dtype_name(dtype), *_geometry(window), place)

    def _find_gathered(self, data: torch.Tensor) -> Wanted:
        buffer, kind = self._gathered[meta_key(data)]
        position = data.storage_offset()
        for parameter, (start, end, *_) in buffer.param_index_map.items():
            if start <= position < end:
                name, shape = self._names[id(parameter)], tuple(data.shape)
                window = Window(name, position - start, shape, tuple(data.stride()))
                return self._of_parameter(
                    window, MAIN if kind == "param" else f".{kind}", data.dtype
                )
        raise ExportError(f"element {position} of a gradient buffer belongs to no parameter")


def _geometry(window: Window) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    return window.shape, window.offset, window.stride


def load(state: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict and content metadata of ``describe``; imports Megatron's classes."""
    tree, metadata = form.load(state)
    return tree, metadata


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
