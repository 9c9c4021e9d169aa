"""Putting split replicated tensors together again: each peer sends the part it captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import LayoutEntry, split_range


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
    """Where tensors must be for this group's broadcasts."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
