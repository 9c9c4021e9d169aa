"""Captured tensors of several shards, read from the bytes of one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from megatron_ft.checkpoint.source import ShardBytes
from megatron_ft.core.shard import LayoutEntry
from megatron_ft.trainer.binding import region_tensor
from megatron_ft.trainer.plan import dtype_from_name


class StoredTensors:
    """The tensors of all shards of one snapshot; views last as long as it is open."""

    def __init__(self, shards: Mapping[str, ShardBytes]) -> None:
        self._shards = shards
        self.entries: Mapping[str, Mapping[str, LayoutEntry]] = {
            shard_id: shard.layout.by_name() for shard_id, shard in shards.items()
        }

    def flat(self, shard_id: str, entry: LayoutEntry) -> torch.Tensor:
        """The stored elements of an entry, flat; a view of read-only memory."""
        raw = region_tensor(self._shards[shard_id].bytes_of(entry))
        return raw.view(dtype_from_name(entry.dtype))


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of something flat; ``read`` gives them."""

    start: int
    stop: int
    shard_id: str
    read: Callable[[], torch.Tensor]


def joined(ranges: Iterable[Range], elements: int) -> torch.Tensor | None:
    """The whole of ``elements`` that ranges give together, or None if they leave a gap.

    A view of what is stored where one range is enough.
    """
    parts: list[torch.Tensor] = []
    position = 0
    for held in sorted(ranges, key=lambda r: (r.start, -r.stop, r.shard_id)):
        if held.start > position:
            return None
        if held.stop > position:
            parts.append(held.read()[position - held.start :])
            position = held.stop
    if position != elements or not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)
