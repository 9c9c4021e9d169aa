"""Tensors of a checkpoint, made from the captured bytes of one or several shards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from megatron_ft.checkpoint.form import Wanted
from megatron_ft.checkpoint.source import ShardBytes
from megatron_ft.checkpoint.stored import Range, StoredTensors, joined
from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import LayoutEntry
from megatron_ft.megatron.logical_map import place_of
from megatron_ft.megatron.optimizer import MAIN, WEIGHT
from megatron_ft.trainer.plan import dtype_from_name, dtype_name

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

    def _flat(self, shard_id: str, wanted: Wanted) -> torch.Tensor:
        if wanted.place is not None:
            return self.whole(wanted.name, wanted.place, shard_id)
        entry = self._stored.entries[shard_id].get(wanted.name)
        if entry is None:
            raise ExportError(f"shard {shard_id} holds no {wanted.name}, which it says it saves")
        if not entry.is_split:
            return self._stored.flat(shard_id, entry)
        if entry.logical is None:
            raise ExportError(f"{wanted.name} of {shard_id} is split, and its place is not known")
        return self.whole(wanted.name, place_of(entry.logical.pieces), shard_id)

    def _held(self, shard_id: str, entry: LayoutEntry) -> _Held:
        assert entry.logical is not None
        first = entry.logical.start
        read = partial(self._stored.flat, shard_id, entry)
        part = Range(first + entry.start, first + entry.stop, shard_id, read)
        return _Held(part, entry, entry.logical.elements)


def _stage(shard_id: str) -> str:
    found = _STAGE.match(shard_id)
    return found.group() if found else ""
