"""From an open snapshot to a checkpoint that Megatron loads with ``--load``.

Megatron's own ``dist_checkpointing.save`` writes it, in this one process, so the files are
those of the installed release.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.checkpoint import native
from megatron_ft.checkpoint.form import CheckpointForm, Wanted
from megatron_ft.checkpoint.publish import whole_folder
from megatron_ft.checkpoint.source import OpenSnapshot
from megatron_ft.core.errors import ExportError
from megatron_ft.core.objects import decode
from megatron_ft.megatron import checkpoint_form, optional_packages
from megatron_ft.megatron.description import FRAMEWORK, megatron_version
from megatron_ft.megatron.export.objects import fill, fill_random_states, random_state_count
from megatron_ft.megatron.export.tensors import CapturedTensors

_OTHERS = "megatron_ft_other_ranks"


class _Rank(NamedTuple):
    """One rank's part of the checkpoint."""

    shard_id: str
    tree: dict[str, Any]
    metadata: dict[str, Any]
    objects: dict[str, Any]


def folder_of(directory: Path, iteration: int) -> Path:
    """Where Megatron looks for the checkpoint of an iteration."""
    return native.checkpoint_folder(directory, iteration)


def announce(directory: Path, iteration: int) -> None:
    """Have Megatron load this iteration, unless ``directory`` holds a newer one."""
    native.point_tracker(directory, iteration)


def advice(directory: Path) -> str:
    """How to go on from what was exported."""
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
    optional_packages.supply()


def form_of(shard_id: str, form: bytes) -> CheckpointForm:
    """A shard's form; ExportError if it has none that the installed Megatron can use."""
    return CheckpointForm.from_bytes(form).require(shard_id, FRAMEWORK, megatron_version())


def _rank(shard_id: str, form: CheckpointForm, objects: bytes, tensors: CapturedTensors) -> _Rank:
    tree, metadata = checkpoint_form.load(form.state)
    values = decode(objects)
    fill(tree, values, tensors.first(shard_id, ".step"))
    return _Rank(shard_id, tree, metadata, values)


def _random_states(rank: _Rank, ranks: list[_Rank]) -> list[Mapping[str, Any]]:
    """The random states that ``rank`` would save: its own, or its data-parallel group's."""
    count = random_state_count(rank.tree)
    if count <= 1:
        return [rank.objects["random"]]
    place = _random_place(rank)
    group = sorted((r for r in ranks if _random_place(r) == place), key=_replica)
    if len(group) != count:
        raise ExportError(
            f"{rank.shard_id} gathers the random states of {count} ranks, {len(group)} are there"
        )
    return [member.objects["random"] for member in group]


def _random_place(rank: _Rank) -> tuple[int, ...]:
    return tuple(rank.tree["rng_state"].global_offset)


def _replica(rank: _Rank) -> Any:
    return rank.tree["rng_state"].replica_id


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
    if isinstance(leaf.data, Wanted):
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
    """Megatron asks for the current device while it writes, and waits for it: answer for host
    memory, where everything is, so that no device is needed and none is touched."""
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
