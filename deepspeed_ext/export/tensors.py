"""Tensors of DeepSpeed's files, made from the captured bytes of one or several shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from deepspeed_ext.fragments import WEIGHT
from megatron_ft.checkpoint.form import Wanted
from megatron_ft.checkpoint.source import ShardBytes
from megatron_ft.checkpoint.stored import Range, StoredTensors, joined
from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import LayoutEntry, Piece
from megatron_ft.trainer.plan import dtype_from_name


class CapturedTensors:
    """The tensors of all shards of one snapshot; views last as long as it is open."""

    def __init__(self, shards: Mapping[str, ShardBytes]) -> None:
        self._stored = StoredTensors(shards)
        self._parameters: dict[str, list[Range]] = {}
        self._sizes: dict[str, int] = {}
        self._split: dict[tuple[str, Piece], list[Range]] = {}
        for shard_id, entries in self._stored.entries.items():
            for entry in entries.values():
                self._note(shard_id, entry)

    def make(self, shard_id: str, wanted: Wanted) -> torch.Tensor:
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
        # torch.save writes all of the memory that a tensor looks into.
        alone = made.untyped_storage().nbytes() == made.nbytes
        return (made if alone else made.clone()).requires_grad_(wanted.requires_grad)

    def _parameter(self, name: str, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """A whole parameter, flat: its masters converted, but where its weights were captured."""
        whole = self._whole(f"{name}/{kind}").to(dtype)
        kept = [held for held in self._parameters.get(f"{name}/{WEIGHT}", [])]
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

    def _note(self, shard_id: str, entry: LayoutEntry) -> None:
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
