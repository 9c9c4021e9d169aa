"""Plans a layout from live tensors, and puts split replicated tensors together again.

Large tensors that are equal on all ranks of a group are captured in parts, one a rank.  After a
restore each peer sends the part that it captured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from megatron_ft.arena.digest import digest_block
from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.core.shard import (
    LayoutEntry,
    LogicalPlace,
    ShardLayout,
    TensorSpec,
    plan_layout,
    split_range,
)
from megatron_ft.trainer.addresses import DENSE, has_lazy_sign, has_memory
from megatron_ft.trainer.state import HasLogicalMap, TrainingState, live_tensors

SPLIT_BYTES = int(os.environ.get("MEGATRON_FT_SPLIT_BYTES", 1 << 16))
"""Replicated tensors of at least this size are split: each part is a broadcast of the restore.

Tests, whose models are small, lower it.
"""

_KIND = attrgetter("layout", "is_meta", "is_quantized")


class SplitTensor(NamedTuple):
    """A tensor of which only ``entry``'s range is filled, and the group that has the rest."""

    entry: LayoutEntry
    tensor: torch.Tensor
    group: Any


def check_group(entry: LayoutEntry, group: Any) -> None:
    """LayoutMismatchError unless the group still cuts the tensor as it was stored."""
    if group is None:
        raise LayoutMismatchError(
            f"{entry.name} was captured as a replicated tensor in {entry.parts} parts; "
            "declare it in `replicated` with the same process group"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    elements = int(torch.Size(entry.shape).numel())
    if size != entry.parts or split_range(elements, rank, size) != (entry.start, entry.stop):
        raise LayoutMismatchError(
            f"{entry.name} was captured in {entry.parts} parts, elements {entry.start} to "
            f"{entry.stop} here; this process is {rank} of {size} in its group: "
            "start with the same data-parallel size and order of ranks"
        )


def exchange(tensors: Iterable[SplitTensor]) -> None:
    """Broadcast every part from the peer that has it; called by all ranks of each group.

    Order is by name, the same everywhere, so overlapping groups cannot wait for each
    other in a circle.  Parts travel as bytes: no backend lacks uint8.
    """
    for entry, tensor, group in sorted(tensors, key=lambda split: split.entry.name):
        flat = tensor.detach().view(-1)
        for part in range(entry.parts):
            start, stop = split_range(flat.numel(), part, entry.parts)
            if start < stop:
                source = dist.get_global_rank(group, part)
                dist.broadcast(flat[start:stop].view(torch.uint8), src=source, group=group)


def exchange_device(group: Any) -> torch.device:
    """The device on which tensors must be for this group's broadcasts."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def known_dtype(name: str) -> torch.dtype | None:
    """The inverse of dtype_name; None for a dtype that this torch lacks."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def dtype_from_name(name: str) -> torch.dtype:
    """As known_dtype, but ConfigError for a dtype that this torch lacks."""
    dtype = known_dtype(name)
    if dtype is None:
        raise ConfigError(f"dtype {name!r} is unknown to torch {torch.__version__}; upgrade torch")
    return dtype


def plan_state(
    state: TrainingState,
    split_bytes: int = SPLIT_BYTES,
    like: ShardLayout | None = None,
) -> ShardLayout:
    """The layout of a complete state; replicated tensors of ``split_bytes`` or more are split.

    With ``like`` only those are that this other layout splits in the same form: ranks have not
    agreed on more.  The state must hold on to its tensors meanwhile: memory is compared by address.
    ConfigError for tensors of unsupported kinds.
    """
    live, boundary = live_tensors(state), state.boundary_tensors().keys()
    splits = _splits(live, boundary, state.replicas(), split_bytes)
    if like is not None:
        known = {e.name: (e.dtype, e.shape) for e in like.entries if e.is_split}
        splits = {
            name: split
            for name, split in splits.items()
            if known.get(name) == (dtype_name(live[name].dtype), tuple(live[name].shape))
        }
    places = state.logical_map() if isinstance(state, HasLogicalMap) else {}
    return plan_layout(
        _spec(name, tensor, name in boundary, splits.get(name, (0, 1)), places.get(name))
        for name, tensor in live.items()
    )


def _splits(
    live: Mapping[str, torch.Tensor],
    boundary: Any,
    replicas: Mapping[str, Any],
    split_bytes: int,
) -> dict[str, tuple[int, int]]:
    """The parts of tensors that this rank captures, by name.

    A tensor that is not contiguous stays whole: cutting its memory order would need a
    copy; so does one that forward may change, which need not be equal everywhere.
    """
    return {
        name: (dist.get_rank(group), dist.get_world_size(group))
        for name, group in replicas.items()
        if name in live
        and name not in boundary
        and live[name].is_contiguous()
        and live[name].nbytes >= max(split_bytes, 1)
    }


def check_replicas(state: TrainingState, layout: ShardLayout) -> None:
    """Check that every tensor that is to be split holds the same bytes on all its replicas.

    Parts of unequal replicas would be restored as a mixture of them.  Collective over
    each group; costs one digest of the split tensors, of the kind that all ranks can make, and
    8 bytes a tensor on the wire.
    Raises ConfigError, on all ranks of the group, naming the first tensor that differs.
    """
    live, groups = live_tensors(state), state.replicas()
    by_group: dict[Any, list[str]] = {}
    for name in sorted(entry.name for entry in layout.entries if entry.parts > 1):
        by_group.setdefault(groups[name], []).append(name)
    for group, names in by_group.items():
        unequal = _unequal([live[name] for name in names], group)
        if unequal:
            raise ConfigError(
                f"{len(unequal)} tensors declared replicated differ between ranks,"
                f" {names[unequal[0]]} first: take them out of `replicated`, or make all ranks "
                "compute the same bits"
            )


def _unequal(tensors: list[torch.Tensor], group: Any) -> list[int]:
    device = exchange_device(group)
    made = [_digest(tensor) for tensor in tensors]
    digests = torch.tensor(made, device=device)
    every = [torch.empty_like(digests) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, digests, group=group)
    return [i for i in range(len(tensors)) if any(other[i] != every[0][i] for other in every)]


def _digest(tensor: torch.Tensor) -> int:
    data = tensor.detach().cpu().view(-1).view(torch.uint8).numpy()
    # Halved, because torch has no unsigned 64-bit integers for collectives.
    return digest_block(data) >> 1


def _spec(
    name: str,
    tensor: torch.Tensor,
    boundary: bool,
    split: tuple[int, int],
    logical: LogicalPlace | None,
) -> TensorSpec:
    _check_kind(name, tensor)
    return TensorSpec(
        name=name,
        dtype=dtype_name(tensor.dtype),
        item_bytes=tensor.element_size(),
        shape=tuple(tensor.shape),
        address=tensor.data_ptr(),
        contiguous=tensor.is_contiguous() and not has_lazy_sign(tensor),
        boundary=boundary,
        split=split,
        logical=logical,
    )


def check_kinds(tensors: Mapping[str, torch.Tensor]) -> None:
    """ConfigError for tensors of unsupported kinds; of thousands of plain ones in a few calls."""
    every = list(tensors.values())
    plain = (
        {*map(type, every)} <= DENSE
        and {*map(_KIND, every)} <= {(torch.strided, False, False)}
        and all(map(torch.Tensor.is_contiguous, every))
        and all(map(torch.Tensor.data_ptr, every))
    )
    for name, tensor in () if plain else tensors.items():
        _check_kind(name, tensor)


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no plain memory of its own, for each element."""
    advice = "give its inner tensors under names of their own"
    if is_lazy(tensor):
        raise ConfigError(
            f"tensor {name!r} has no shape yet, as its module is a lazy one: run one forward pass "
            "before load() and before the optimizer is made"
        )
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        place = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__}"
        kind = f"{place}, which has a shape and no values"
        advice = "make it outside of FakeTensorMode and torch.device('meta'), or fill it before"
    elif tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        layout = "nested" if tensor.is_nested else tensor.layout
        kind = f"{layout}, {tensor.device}, {tensor.dtype}"
    elif hasattr(tensor, "__tensor_flatten__") or (
        # A storage with a size but no memory; a freed one has no size either.
        not has_memory(tensor) and tensor.untyped_storage().nbytes() > 0
    ):
        kind = f"a {type(tensor).__name__}, which keeps its values in other tensors"
    else:
        return _check_memory(name, tensor)
    raise ConfigError(
        f"tensor {name!r} is {kind}: only dense tensors and DTensors can be captured; {advice}"
    )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no memory now, and what could be captured but not filled again in place."""
    if not has_memory(tensor):
        raise ConfigError(
            f"tensor {name!r} of shape {list(tensor.shape)} has no memory: its storage was resized "
            "to nothing, as frameworks do that shard it; give the shards that they keep instead"
        )
    repeated = zip(tensor.shape, tensor.stride(), strict=True)
    if not tensor.is_contiguous() and any(size > 1 and step == 0 for size, step in repeated):
        raise ConfigError(
            f"tensor {name!r} is expanded: elements of its shape {list(tensor.shape)} share "
            "memory, so that a snapshot could not be loaded into it; give each its own with "
            ".clone()"
        )
