"""Tensors of a checkpoint, made from the captured bytes of one or several shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megatron_ft.capture.binding import region_tensor
from megatron_ft.capture.plan import dtype_from_name, dtype_name
from megatron_ft.disk.source import ShardBytes
from megatron_ft.errors import ExportError
from megatron_ft.megatron.checkpoint_form import Wanted
from megatron_ft.megatron.logical_map import place_of
from megatron_ft.megatron.optimizer import MAIN, WEIGHT
from megatron_ft.shard import LayoutEntry

_STAGE = re.compile(r"pp\d+-tp\d+")


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened parameter, held by ``shard_id``."""

    start: int
    stop: int
    shard_id: str
    entry: LayoutEntry


class CapturedTensors:
    """The tensors of all shards of one snapshot; views last as long as it is open."""

    def __init__(self, shards: Mapping[str, ShardBytes]) -> None:
        self._shards = shards
        self._entries = {shard_id: shard.layout.by_name() for shard_id, shard in shards.items()}
        self._ranges: dict[object, list[Range]] = {}
        for shard_id, entries in self._entries.items():
            for entry in entries.values():
                if entry.logical is not None:
                    held = _held(shard_id, entry)
                    key = (entry.name, place_of(entry.logical.pieces))
                    self._ranges.setdefault(key, []).append(held)

    def make(self, shard_id: str, wanted: Wanted) -> torch.Tensor:
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
        """A weight with those of its elements that were captured beside their masters."""
        ranges = self._ranges.get((main.removesuffix(MAIN) + WEIGHT, place), [])
        copies = [r for r in ranges if r.entry.dtype == dtype_name(weight.dtype)]
        if not copies:
            return weight
        whole = weight.clone()
        for held in sorted(copies, key=lambda r: _stage(r.shard_id) == _stage(near)):
            whole[held.start : held.stop] = self._stored(held.shard_id, held.entry)
        return whole

    def first(self, shard_id: str, suffix: str) -> torch.Tensor | None:
        """The shard's first captured tensor whose name ends with ``suffix``, if there is one."""
        for name, entry in self._entries[shard_id].items():
            if name.endswith(suffix):
                return self._stored(shard_id, entry).view(entry.shape)
        return None

    def whole(self, name: str, place: tuple[str, tuple[int, ...]], near: str) -> torch.Tensor:
        """A parameter, flattened, put together from the ranges that shards hold of it.

        Where several hold the same, those of the pipeline and tensor rank of ``near`` count.
        """
        ranges = self._ranges.get((name, place), [])
        own = [r for r in ranges if _stage(r.shard_id) == _stage(near)]
        for candidates in (own, ranges):
            chosen = cover(candidates)
            if chosen:
                parts = [self._stored(r.shard_id, r.entry)[skip:] for r, skip in chosen]
                return parts[0] if len(parts) == 1 else torch.cat(parts)
        raise ExportError(
            f"the shards hold only parts of {name} ({place[0]} at {place[1]}): is a "
            "data-parallel rank missing?"
        )

    def _flat(self, shard_id: str, wanted: Wanted) -> torch.Tensor:
        if wanted.place is not None:
            return self.whole(wanted.name, wanted.place, shard_id)
        entry = self._entries[shard_id].get(wanted.name)
        if entry is None:
            raise ExportError(f"shard {shard_id} holds no {wanted.name}, which it says it saves")
        if not entry.is_split:
            return self._stored(shard_id, entry)
        if entry.logical is None:
            raise ExportError(f"{wanted.name} of {shard_id} is split, and its place is not known")
        return self.whole(wanted.name, place_of(entry.logical.pieces), shard_id)

    def _stored(self, shard_id: str, entry: LayoutEntry) -> torch.Tensor:
        """The stored elements of an entry, flat; a view of read-only memory."""
        raw = region_tensor(self._shards[shard_id].bytes_of(entry))
        return raw.view(dtype_from_name(entry.dtype))


def _stage(shard_id: str) -> str:
    found = _STAGE.match(shard_id)
    return found.group() if found else ""


def _held(shard_id: str, entry: LayoutEntry) -> Range:
    assert entry.logical is not None
    first = entry.logical.start
    return Range(first + entry.start, first + entry.stop, shard_id, entry)


def cover(ranges: Iterable[Range]) -> list[tuple[Range, int]]:
    """Ranges that follow each other without a gap, each with what is to be skipped of it.

    Empty if they leave a gap: at the start, between, or before the parameter's end.
    """
    chosen: list[tuple[Range, int]] = []
    position, end = 0, 0
    for held in sorted(ranges, key=lambda r: (r.start, -r.stop, r.shard_id)):
        assert held.entry.logical is not None
        end = held.entry.logical.elements
        if held.start > position:
            return []
        if held.stop > position:
            chosen.append((held, position - held.start))
            position = held.stop
    return chosen if position == end else []
