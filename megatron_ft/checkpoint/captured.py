"""Captured tensors of several shards, read from the bytes of one snapshot, and put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from megatron_ft.checkpoint.source import ShardBytes, ShardParts
from megatron_ft.core.shard import LayoutEntry
from megatron_ft.erasure.reshape_plan import Copy, Window, fill, whole, windows
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


class GlobalTensor(NamedTuple):
    """Dtype and shape of a tensor of the unsharded model."""

    dtype: str
    shape: tuple[int, ...]


class GlobalTensors(Mapping[str, GlobalTensor]):
    """The tensors of the unsharded model in one snapshot, by name.

    A captured tensor without a logical place goes by its own name, ``SHARD:NAME`` where several
    shards hold different ones.  ``bytes_read`` counts what ``read`` has read so far.
    """

    def __init__(self, shards: Mapping[str, ShardParts]) -> None:
        self.bytes_read = 0
        self._shards = shards
        self._windows: dict[str, list[tuple[_Stored, Window]]] = {}
        holders = Counter(entry.name for part in shards.values() for entry in part.layout.entries)
        for shard_id in sorted(shards):
            for entry in shards[shard_id].layout.entries:
                own = entry.logical is None and not entry.is_split and holders[entry.name] > 1
                for window in windows(entry):
                    name = f"{shard_id}:{entry.name}" if own else window.name
                    stored = (_Stored(shard_id, entry), window._replace(name=name))
                    self._windows.setdefault(name, []).append(stored)

    def __getitem__(self, name: str) -> GlobalTensor:
        stored, window = self._windows[name][0]
        return GlobalTensor(stored.entry.dtype, window.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._windows))

    def __len__(self) -> int:
        return len(self._windows)

    def read(self, name: str) -> torch.Tensor:
        """A copy of the whole tensor; only its ranges are read and verified.

        KeyError if there is none of this name, MissingRangeError if no shard holds a part of it,
        SnapshotUnavailableError if a block is damaged.
        """
        dtype, shape = self[name]
        tensor = torch.empty(shape, dtype=dtype_from_name(dtype))
        held = [one for one in self._windows[name] if one[0].entry.dtype == dtype]
        for copy in fill(whole(name, shape), held):
            source = torch.as_strided(self._elements(copy), copy.shape, copy.source_stride)
            torch.as_strided(tensor, copy.shape, copy.stride, copy.offset).copy_(source)
        return tensor

    def _elements(self, copy: Copy[_Stored]) -> torch.Tensor:
        """The stored elements that a copy spans, flat."""
        shard_id, entry = copy.source
        dtype = dtype_from_name(entry.dtype)
        start, stop = (entry.offset + at * dtype.itemsize for at in copy.span)
        self.bytes_read += stop - start
        return region_tensor(self._shards[shard_id].read(start, stop)).view(dtype)


class _Stored(NamedTuple):
    shard_id: str
    entry: LayoutEntry
