"""Exports an open snapshot as a checkpoint that DeepSpeed loads with ``load_checkpoint``.

The files' trees are those of the checkpoint form.  Their tensors are made from the captured bytes
of one or several shards, and the small values that training changes are set to the snapshot's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext import client_state
from deepspeed_ext.checkpoint_form import EXTRA_STATE, FRAMEWORK, deepspeed_version, files_of
from deepspeed_ext.logical_map import WEIGHT
from deepspeed_ext.optimizers.view import group_names, set_fields
from megatron_ft.checkpoint import export as form
from megatron_ft.checkpoint.captured import Range, StoredTensors, joined
from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.checkpoint.export import CheckpointForm, TensorRecipe, whole_folder
from megatron_ft.checkpoint.native import LATEST, latest_tag, step_of_tag
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes
from megatron_ft.core.errors import ExportError
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import LayoutEntry, Piece
from megatron_ft.trainer.plan import dtype_from_name


class FileTensors:
    """The tensors of all shards of one snapshot; views last as long as it is open."""

    def __init__(self, shards: Mapping[str, ShardBytes]) -> None:
        self._stored = StoredTensors(shards)
        self._parameters: dict[str, list[Range]] = {}
        self._sizes: dict[str, int] = {}
        self._split: dict[tuple[str, Piece], list[Range]] = {}
        for shard_id, entries in self._stored.entries.items():
            for entry in entries.values():
                self._index(shard_id, entry)

    def make(self, shard_id: str, wanted: TensorRecipe) -> torch.Tensor:
        """The tensor that ``shard_id`` would have saved, in memory of just its size.

        ExportError if bytes of it are in no shard.
        """
        dtype = dtype_from_name(wanted.dtype)
        if not wanted.name:
            return torch.empty(wanted.shape, dtype=dtype)
        if wanted.place is not None:
            flat = self._parameter(wanted.place[0], wanted.name, dtype)
        else:
            flat = self._own(shard_id, wanted.name).to(dtype)
        # as_strided counts from the start of the storage, not of the tensor.
        first = flat.storage_offset() + wanted.offset
        made = torch.as_strided(flat, wanted.shape, wanted.stride, first)
        # torch.save writes all of the memory that a tensor is a view of.
        alone = made.untyped_storage().nbytes() == made.nbytes
        return (made if alone else made.clone()).requires_grad_(wanted.requires_grad)

    def _parameter(self, name: str, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """A whole parameter, flat: its masters converted, but where its weights were captured."""
        whole = self._whole(f"{name}/{kind}").to(dtype)
        kept = self._parameters.get(f"{name}/{WEIGHT}", [])
        if kept:
            whole = whole.clone()
        for held in kept:
            whole[held.start : held.stop] = held.read()
        return whole

    def _whole(self, name: str) -> torch.Tensor:
        made = joined(self._parameters.get(name, []), self._sizes.get(name, -1))
        if made is None:
            raise ExportError(
                f"the shards hold only parts of {name}, or nothing of it: is a data-parallel rank "
                "missing?"
            )
        return made

    def _own(self, shard_id: str, name: str) -> torch.Tensor:
        """A captured tensor, flat; its parts from all ranks that hold one, if it was split."""
        entry = self._stored.entries[shard_id].get(name)
        if entry is None:
            raise ExportError(f"shard {shard_id} holds no {name}, which it says it saves")
        if not entry.is_split:
            return self._stored.flat(shard_id, entry)
        made = None
        if entry.logical is not None:
            parts = self._split[name, entry.logical.pieces[0]]
            made = joined(parts, entry.logical.elements)
        if made is None:
            raise ExportError(f"{name} of {shard_id} is split, and not all parts are known")
        return made

    def _index(self, shard_id: str, entry: LayoutEntry) -> None:
        if entry.logical is None:
            return
        read = partial(self._stored.flat, shard_id, entry)
        if entry.is_split:
            key = (entry.name, entry.logical.pieces[0])
            held = Range(entry.start, entry.stop, shard_id, read)
            self._split.setdefault(key, []).append(held)
        for piece in entry.logical.pieces:
            self._sizes[piece.global_name] = piece.global_shape[0]
            self._parameters.setdefault(piece.global_name, []).extend(
                _ranges(shard_id, entry, piece, read)
            )


def _ranges(
    shard_id: str, entry: LayoutEntry, piece: Piece, read: partial[torch.Tensor]
) -> Iterator[Range]:
    """The elements of a flattened parameter that are stored of one piece: a range, or none."""
    first = max(piece.offset, entry.start)
    last = min(piece.offset + piece.shape[0], entry.stop)
    if first < last:
        start = piece.global_offset[0] + first - piece.offset
        chosen = slice(first - entry.start, last - entry.start)
        yield Range(start, start + last - first, shard_id, lambda: read()[chosen])


Tree = dict[str, Any]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_INNER = ("base_optimizer_state", "optimizer_state_dict")
"""Names under which a wrapper keeps the state dict of its inner optimizer."""


def fill(tree: Any, objects: Mapping[str, Any]) -> None:
    """Set one file's small values as of its snapshot, in place.

    ``objects`` is what EngineState.objects() gave.  A file of weights alone has none.
    ExportError if the file and the objects do not fit each other.
    """
    if "global_steps" in tree:
        _fill_model_file(tree, objects)
    if "optimizer_state_dict" in tree:
        _fill_optimizer(tree["optimizer_state_dict"], objects)
    elif tree.get("optimizer") is not None:
        _fill_optimizer(tree["optimizer"], objects)


def _fill_model_file(tree: Tree, objects: Mapping[str, Any]) -> None:
    training = objects["training"]
    for name in _COUNTERS:
        tree[name] = training["counters"][name]
    schedules = training["schedules"]
    for name, schedule in (
        ("lr_scheduler", "lr_scheduler"),
        ("random_ltd", "random_ltd_scheduler"),
    ):
        if tree[name] is not None:
            tree[name] = schedules[schedule]
    for name, state in objects["modules"].items():
        _fill_module(tree["module"], name, state)
    declared = tree["ds_config"].get("inmem_snapshot", {}).get("client_state", {})
    tree.update(client_entries(objects, declared))


def client_entries(objects: Mapping[str, Any], declared: Mapping[str, str]) -> Tree:
    """The ``client_state`` that the script would have saved at the snapshot's step.

    ``declared`` says which entries follow which of DeepSpeed's counters.  ExportError if it
    was given at another step and holds an entry whose value at this one is unknown.
    """
    state = objects.get(client_state.NAME)
    if not state:
        return {}
    entries = dict(state["entries"])
    if state["given_at"] != state["step"]:
        unknown = sorted(entries.keys() - declared.keys())
        if unknown:
            raise ExportError(
                f"the script gave its client_state at step {state['given_at']}, the snapshot is "
                f"of step {state['step']}, and the value of {', '.join(map(repr, unknown))} at "
                'that step is unknown: declare it under "client_state" in the inmem_snapshot '
                "section, or call deepspeed_ext.set_client_state"
            )
        counters = objects["training"]["counters"]
        followed = {n: c for n, c in declared.items() if n in entries and c in counters}
        entries.update({name: counters[counter] for name, counter in followed.items()})
    return entries


def _fill_module(module: Tree | None, name: str, state: Any) -> None:
    key = f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE
    if module is None or key not in module:
        raise ExportError(f"DeepSpeed saves no extra state of {name}, the snapshot holds one")
    module[key] = state


def _fill_optimizer(node: Tree, objects: Mapping[str, Any]) -> None:
    """``node`` is what an optimizer's state_dict() gave, a wrapper's or torch's own."""
    captured = objects["optimizer"]
    scaler, wrapper = captured.get("scaler", {}), captured.get("wrapper", {})
    if "loss_scaler" in node:
        set_fields(node["loss_scaler"], scaler)
    for values in (scaler, wrapper):
        node.update({name: values[name] for name in node.keys() & values.keys()})
    inner = next((node[name] for name in _INNER if name in node), None)
    if node.keys() >= {"state", "param_groups"}:
        inner = node
    if inner is None:
        raise ExportError("DeepSpeed's optimizer was saved in a way that is not known")
    _fill_inner(inner, objects)


def _fill_inner(inner: Any, objects: Mapping[str, Any]) -> None:
    numbers = list(objects["numbers"].values())
    if isinstance(inner, list):
        # elastic_checkpoint: states without groups.
        states = inner
    else:
        (captured,) = objects["groups"]
        groups = inner["param_groups"]
        for name, group in zip(group_names(groups), groups, strict=True):
            group.update(captured[name])
        states = [inner["state"][index] for index in sorted(inner["state"])]
    if not numbers:
        return  # it keeps nothing but tensors
    if len(states) != len(numbers):
        raise ExportError(f"{len(states)} optimizer states were recorded, {len(numbers)} captured")
    for state, values in zip(states, numbers, strict=True):
        state.update(values)


def folder_of(directory: Path, iteration: int) -> Path:
    return directory / f"global_step{iteration}"


def export(shards: OpenSnapshot, folder: Path) -> None:
    """Write ``folder``, one checkpoint of DeepSpeed's, from a snapshot.

    It appears whole or not at all.  ExportError if the snapshot does not say enough to make
    one.
    """
    installed = deepspeed_version()
    forms = {
        shard_id: CheckpointForm.from_bytes(shard.form).require(shard_id, FRAMEWORK, installed)
        for shard_id, shard in shards.items()
    }
    tensors = FileTensors(shards)
    with whole_folder(folder, shards) as partial:
        for shard_id, found in forms.items():
            objects = decode(shards[shard_id].objects)
            for name, recorded in files_of(found.state).items():
                _write(partial / _plain(name), _tree(recorded, shard_id, tensors), objects)


def announce(directory: Path, iteration: int) -> None:
    """Have DeepSpeed load this step, unless ``latest`` names a newer one."""
    known = step_of_tag(latest_tag(directory))
    if known is None or known <= iteration:
        DiskCalls().write_file(directory / LATEST, [folder_of(directory, iteration).name.encode()])


def advice(directory: Path) -> str:
    return f"engine.load_checkpoint({str(directory)!r})"


def _tree(recorded: bytes, shard_id: str, tensors: FileTensors) -> Any:
    """One file's content, tensors in place; what the rank saved twice is one tensor."""
    made: dict[TensorRecipe, Any] = {}

    def make(wanted: TensorRecipe) -> Any:
        if wanted not in made:
            made[wanted] = tensors.make(shard_id, wanted)
        return made[wanted]

    return form.load_form(recorded, make)


def _write(path: Path, tree: Any, objects: dict[str, Any]) -> None:
    fill(tree, objects)
    with path.open("xb") as stream:
        torch.save(tree, stream)


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise ExportError(f"DeepSpeed would save {name!r}, which is not a file name")
    return name
