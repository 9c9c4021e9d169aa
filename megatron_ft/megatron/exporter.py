"""Writes an open snapshot as a checkpoint that Megatron loads with ``--load``.

Three steps: each rank's form, which was recorded when training started, gets the small values
that change in training; its tensors are made from the captured bytes of one or several shards;
Megatron's own ``dist_checkpointing.save`` writes all of it in this one process, so that the files
are those of the installed release.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_ft.checkpoint import native
from megatron_ft.checkpoint.captured import Range, StoredTensors, joined
from megatron_ft.checkpoint.export import CheckpointForm, TensorRecipe, load_form, whole_folder
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes
from megatron_ft.core.errors import ExportError
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import LayoutEntry
from megatron_ft.megatron import versions
from megatron_ft.megatron.logical_map import FRAMEWORK, megatron_version, place_of
from megatron_ft.megatron.optimizer import MAIN, WEIGHT
from megatron_ft.trainer.plan import dtype_from_name, dtype_name

Tree = dict[str, Any]


def fill(tree: Tree, objects: Mapping[str, Any], step: torch.Tensor | None) -> None:
    """Set one rank's small values as of its snapshot, in place.

    ``objects`` is what MegatronState.objects() gave, ``step`` the optimizer's step where
    the parameters have one each (torch's Adam).  Random states: see ``fill_random_states``.
    ExportError if the form and the objects do not fit each other.
    """
    for name, value in objects["arguments"].items():
        setattr(tree["args"], name, value)
    tree["iteration"] = objects["iteration"]
    tree["num_floating_point_operations_so_far"] = objects["floating_point_operations"]
    if "opt_param_scheduler" in tree:
        tree["opt_param_scheduler"] = objects["schedule"]
    if "optimizer" in tree:
        _fill_optimizers(_optimizers(tree["optimizer"]), objects, step)
    _fill_rerun_machine(tree, objects["rerun_machine"])
    for name, state in objects["modules"].items():
        _fill_module(tree, name, state)


def _fill_module(tree: Tree, name: str, state: Any) -> None:
    """Set what a module keeps outside parameters and buffers; ``name`` begins with its chunk."""
    chunk, _, module = name.partition(".")
    number = chunk.removeprefix("chunk")
    model = tree[f"model{number}" if f"model{number}" in tree else "model"]
    key = f"{module}._extra_state"
    if key not in model:
        raise ExportError(f"Megatron saves no extra state of {name}, the snapshot holds one")
    model[key] = _with_value(model[key], state)


def _optimizers(node: Tree) -> list[Tree]:
    """The optimizers of a chain that own something, in order; one alone is not wrapped."""
    if node.keys() & {"param_state", "param_groups", "optimizer"}:
        return [node]
    return [node[index] for index in sorted(node) if node[index]]


def _fill_optimizers(
    nodes: Sequence[Tree], objects: Mapping[str, Any], step: torch.Tensor | None
) -> None:
    groups, scalers = objects["groups"], objects["scalers"]
    if len(nodes) != len(groups):
        raise ExportError(f"the form has {len(nodes)} optimizers, the snapshot {len(groups)}")
    for node, captured, scaler in zip(nodes, groups, scalers, strict=True):
        inner = _value(node["optimizer"]) if "optimizer" in node else node
        for group, values in zip(inner["param_groups"], captured, strict=True):
            _fill_group(group, values, step)
        # Megatron leaves a step of zero out, and the form was made before the first one.  Of a
        # chain, Adam counts steps and Muon does not.
        counts = any("betas" in group for group in captured)
        if counts and "state" in inner and step is not None and step.item():
            inner["state"]["common_step"] = step
        if "grad_scaler" in node:
            node["grad_scaler"] = _with_value(node["grad_scaler"], scaler)


def _fill_group(group: Tree, values: Mapping[str, Any], step: torch.Tensor | None) -> None:
    for name in group.keys() & values.keys():
        group[name] = values[name]
    if "step" in group and "step" not in values:
        if step is None:
            raise ExportError("the optimizer's step is in no captured tensor")
        group["step"] = step.item()


def _fill_rerun_machine(tree: Tree, state: Mapping[str, Any] | None) -> None:
    if state is None:
        tree.pop("rerun_state_machine", None)
        return
    node = tree.setdefault("rerun_state_machine", {})
    for name, value in state.items():
        node[name] = _with_value(node.get(name), value)


def fill_random_states(tree: Tree, captured: Sequence[Mapping[str, Any]]) -> None:
    if "rng_state" in tree:
        states = [_megatron_names(random) for random in captured]
        tree["rng_state"] = _with_value(tree["rng_state"], states)


def _megatron_names(random: Mapping[str, Any]) -> Tree:
    generators = random["generators"]
    return {
        "random_rng_state": generators["python"],
        "np_rng_state": generators["numpy"],
        "torch_rng_state": generators["torch"],
        "cuda_rng_state": generators["cuda"],
        "rng_tracker_states": random["tracker"],
    }


def _value(node: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return node.data if isinstance(node, ShardedObject) else node


def _with_value(node: Any, value: Any) -> Any:
    """``value`` in the ShardedObject ``node``, or itself if ``node`` is of another class."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    if not isinstance(node, ShardedObject):
        return value
    node.data = value
    return node


_STAGE = re.compile(r"pp\d+-tp\d+")


class _Held(NamedTuple):
    """A range of a flattened parameter of ``elements``, and the entry that holds it."""

    range: Range
    entry: LayoutEntry
    elements: int


class CapturedTensors:
    """The tensors of all shards of one snapshot; views last as long as it is open."""

    def __init__(self, shards: Mapping[str, ShardBytes]) -> None:
        self._stored = StoredTensors(shards)
        self._ranges: dict[object, list[_Held]] = {}
        for shard_id, entries in self._stored.entries.items():
            for entry in entries.values():
                if entry.logical is not None:
                    key = (entry.name, place_of(entry.logical.pieces))
                    self._ranges.setdefault(key, []).append(self._held(shard_id, entry))

    def make(self, shard_id: str, wanted: TensorRecipe) -> torch.Tensor:
        """The tensor that ``shard_id`` would have saved; zeros for padding.

        ExportError if bytes of it are in no shard.
        """
        dtype = dtype_from_name(wanted.dtype)
        if not wanted.name:
            return torch.zeros(wanted.shape, dtype=dtype)
        flat = self._flat(shard_id, wanted).to(dtype)
        if wanted.place is not None and wanted.name.endswith(MAIN):
            flat = self._with_copies(flat, wanted.name, wanted.place, shard_id)
        # as_strided counts from the start of the storage, not of the tensor.
        first = flat.storage_offset() + wanted.offset
        return torch.as_strided(flat, wanted.shape, wanted.stride, first)

    def _with_copies(
        self, weight: torch.Tensor, main: str, place: tuple[str, tuple[int, ...]], near: str
    ) -> torch.Tensor:
        """A weight with those of its elements that were captured in addition to their masters."""
        ranges = self._ranges.get((main.removesuffix(MAIN) + WEIGHT, place), [])
        copies = [r.range for r in ranges if r.entry.dtype == dtype_name(weight.dtype)]
        if not copies:
            return weight
        whole = weight.clone()
        for held in sorted(copies, key=lambda r: _stage(r.shard_id) == _stage(near)):
            whole[held.start : held.stop] = held.read()
        return whole

    def first(self, shard_id: str, suffix: str) -> torch.Tensor | None:
        """The shard's first captured tensor whose name ends with ``suffix``, if there is one."""
        for name, entry in self._stored.entries[shard_id].items():
            if name.endswith(suffix):
                return self._stored.flat(shard_id, entry).view(entry.shape)
        return None

    def whole(self, name: str, place: tuple[str, tuple[int, ...]], near: str) -> torch.Tensor:
        """A parameter, flattened, put together from the ranges that shards hold of it.

        Where several hold the same, those of the pipeline and tensor rank of ``near`` count.
        """
        ranges = self._ranges.get((name, place), [])
        own = [held for held in ranges if _stage(held.range.shard_id) == _stage(near)]
        for candidates in (own, ranges):
            elements = candidates[0].elements if candidates else 0
            if (made := joined((held.range for held in candidates), elements)) is not None:
                return made
        raise ExportError(
            f"the shards hold only parts of {name} ({place[0]} at {place[1]}): is a "
            "data-parallel rank missing?"
        )

    def _flat(self, shard_id: str, wanted: TensorRecipe) -> torch.Tensor:
        if wanted.place is not None:
            return self.whole(wanted.name, wanted.place, shard_id)
        entry = self._stored.entries[shard_id].get(wanted.name)
        if entry is None:
            raise ExportError(f"shard {shard_id} holds no {wanted.name}, which it says it saves")
        if not entry.is_split:
            return self._stored.flat(shard_id, entry)
        if entry.logical is None:
            raise ExportError(f"{wanted.name} of {shard_id} is split, and its place is not known")
        whole = self.whole(wanted.name, place_of(entry.logical.pieces), shard_id)
        # The window counts from the first element of the tensor, which may be a range of ``whole``.
        return whole[entry.logical.start :]

    def _held(self, shard_id: str, entry: LayoutEntry) -> _Held:
        assert entry.logical is not None
        first = entry.logical.start
        read = partial(self._stored.flat, shard_id, entry)
        part = Range(first + entry.start, first + entry.stop, shard_id, read)
        return _Held(part, entry, entry.logical.elements)


def _stage(shard_id: str) -> str:
    found = _STAGE.match(shard_id)
    return found.group() if found else ""


_OTHERS = "megatron_ft_other_ranks"


class _Rank(NamedTuple):
    """One rank's part of the checkpoint."""

    shard_id: str
    tree: dict[str, Any]
    metadata: dict[str, Any]
    objects: dict[str, Any]


def folder_of(directory: Path, iteration: int) -> Path:
    return native.checkpoint_folder(directory, iteration)


def announce(directory: Path, iteration: int) -> None:
    """Have Megatron load this iteration, unless ``directory`` holds a newer one."""
    native.point_tracker(directory, iteration)


def advice(directory: Path) -> str:
    return f"--load {directory}"


def export(shards: OpenSnapshot, folder: Path) -> None:
    """Write ``folder``, one checkpoint of Megatron's, from a snapshot.

    It appears whole or not at all.  ExportError if the snapshot does not say enough to make
    one.
    """
    tree, metadata = combined(shards)
    with whole_folder(folder, shards) as partial:
        _save(tree, metadata, partial)


def combined(shards: OpenSnapshot) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict of all ranks together, and Megatron's content metadata.

    What is not sharded comes from the first rank, as in Megatron's own checkpoints.
    """
    _prepare_megatron()
    forms = {shard_id: form_of(shard_id, shard.form) for shard_id, shard in shards.items()}
    tensors = CapturedTensors(shards)
    ranks = [
        _rank(shard_id, forms[shard_id], shards[shard_id].objects, tensors)
        for shard_id in sorted(forms, key=lambda shard_id: forms[shard_id].rank)
    ]
    for rank in ranks:
        fill_random_states(rank.tree, _random_states(rank, ranks))
    first = ranks[0]
    tree = _owned(first, tensors)
    others = [leaf for rank in ranks[1:] for leaf in _owned_leaves(rank, tensors)]
    if others:
        # Megatron takes sharded leaves out wherever they are, and all that is left of this is
        # nothing; an empty one it would save.
        tree[_OTHERS] = {str(number): leaf for number, leaf in enumerate(others)}
    return tree, first.metadata


def _prepare_megatron() -> None:
    """Make Megatron importable where training would not be, and keep it from talking of that."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    versions.supply_packages()


def form_of(shard_id: str, form: bytes) -> CheckpointForm:
    """A shard's form; ExportError if it has none that the installed Megatron can use."""
    return CheckpointForm.from_bytes(form).require(shard_id, FRAMEWORK, megatron_version())


def _rank(shard_id: str, form: CheckpointForm, objects: bytes, tensors: CapturedTensors) -> _Rank:
    tree, metadata = load_form(form.state)
    values = decode(objects)
    fill(tree, values, tensors.first(shard_id, ".step"))
    return _Rank(shard_id, tree, metadata, values)


def _random_states(rank: _Rank, ranks: list[_Rank]) -> list[Mapping[str, Any]]:
    """The random states that ``rank`` would save: its own, or its data-parallel group's."""
    count = len(_value(rank.tree["rng_state"])) if "rng_state" in rank.tree else 0
    if count <= 1:
        return [rank.objects["random"]]
    place = rank.tree["rng_state"].global_offset
    group = [one for one in ranks if one.tree["rng_state"].global_offset == place]
    group.sort(key=lambda one: one.tree["rng_state"].replica_id)
    if len(group) != count:
        raise ExportError(
            f"{rank.shard_id} gathers the random states of {count} ranks, {len(group)} are there"
        )
    return [member.objects["random"] for member in group]


def _owned(rank: _Rank, tensors: CapturedTensors) -> dict[str, Any]:
    """A rank's tree with its tensors; an empty shell where another rank's copy is the one saved."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    def visit(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, list):
            return [visit(value) for value in node]
        if not _is_sharded(node):
            return node
        return _made(node, rank, tensors) if _is_main(node) else LocalNonpersistentObject(None)

    owned: dict[str, Any] = visit(rank.tree)
    return owned


def _owned_leaves(rank: _Rank, tensors: CapturedTensors) -> Iterator[Any]:
    """Everything sharded of which ``rank`` has the copy that is saved."""
    from megatron_ft.megatron.save_form import sharded

    for leaf in sharded(rank.tree):
        if _is_main(leaf):
            yield _made(leaf, rank, tensors)


def _made(leaf: Any, rank: _Rank, tensors: CapturedTensors) -> Any:
    if isinstance(leaf.data, TensorRecipe):
        leaf.data = tensors.make(rank.shard_id, leaf.data)
    return leaf


def _is_sharded(node: Any) -> bool:
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    return isinstance(node, ShardedBase)


def _is_main(leaf: Any) -> bool:
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    return bool(is_main_replica(leaf.replica_id))


def _save(tree: dict[str, Any], metadata: dict[str, Any], directory: Path) -> None:
    from megatron.core import dist_checkpointing

    with _alone(), _on_host():
        dist_checkpointing.save(tree, str(directory), content_metadata=metadata)


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process, which Megatron asks for; it listens on loopback only."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _on_host() -> Iterator[None]:
    """Answer for host memory when Megatron asks for the current device, or waits for it.

    All tensors are in host memory, so no device is needed and none is touched.
    """
    import torch

    cuda: Any = torch.cuda
    answers = {
        "synchronize": lambda device=None: None,
        "current_device": lambda: torch.device("cpu"),
    }
    real = {name: getattr(cuda, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(cuda, name, answer)
        yield
    finally:
        for name, function in real.items():
            setattr(cuda, name, function)
