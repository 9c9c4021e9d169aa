"""A snapshot of one layout, filled into live tensors of another: the plan, carried out by torch.

Follows the rules of a reshape: a tensor with a logical place comes from all old ones of its global
name, dtype and shape; any other from the old one of its name and shape at the same place of the
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import torch

from megatron_ft.checkpoint.captured import GlobalTensors, StoredTensors
from megatron_ft.checkpoint.source import OpenSnapshot, ShardParts
from megatron_ft.core.identity import ShardPlace, place_of_shard
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import LayoutEntry, LogicalPlace
from megatron_ft.erasure.reshape_plan import Window, fill, windows
from megatron_ft.trainer.plan import dtype_name, plan_state
from megatron_ft.trainer.state import Reshapes, TrainingState, live_tensors, same_bits
from tests.support.late_capture import overwrite


class Held(NamedTuple):
    """Where an old tensor is."""

    shard: str
    entry: LayoutEntry


class OldTensors:
    """The tensors of an old layout, as the rank of ``shard`` in a new one looks for them."""

    def __init__(self, shards: OpenSnapshot, shard: str) -> None:
        self._stored = StoredTensors(shards)
        self.near = sorted(shards, key=partial(_distance, place(shard)))
        self._placed: dict[tuple[object, ...], list[tuple[Held, Window]]] = {}
        self._plain: dict[tuple[object, ...], list[tuple[Held, Window]]] = {}
        for old in self.near:
            for entry in self._stored.entries[old].values():
                for window in windows(entry):
                    known = self._placed if entry.logical else self._plain
                    key = (window.name, entry.dtype, window.shape)
                    if entry.logical or _same_part(place(old), place(shard)):
                        known.setdefault(key, []).append((Held(old, entry), window))

    def fill(self, tensor: torch.Tensor, entry: LayoutEntry) -> None:
        """Fill the whole of a live tensor; each of its elements is written once."""
        whole = msgspec.structs.replace(entry, start=0, stop=tensor.numel())
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        written = torch.zeros(tensor.numel())
        for window in windows(whole):
            known = self._placed if entry.logical else self._plain
            for copy in fill(window, known.get((window.name, entry.dtype, window.shape), [])):
                source = self._stored.flat(*copy.source)
                taken = torch.as_strided(
                    source,
                    copy.shape,
                    copy.source_stride,
                    source.storage_offset() + copy.source_offset,
                )
                torch.as_strided(flat, copy.shape, copy.stride, copy.offset).copy_(taken)
                torch.as_strided(written, copy.shape, copy.stride, copy.offset).add_(1)
        assert bool((written == 1).all()), f"{entry.name} is not filled once"
        tensor.detach().copy_(flat.view(tensor.shape))


def place(shard: str) -> ShardPlace:
    found = place_of_shard(shard)
    assert found is not None
    return found


def _same_part(left: ShardPlace, right: ShardPlace) -> bool:
    return left._replace(dp=0) == right._replace(dp=0)


def _distance(near: ShardPlace, shard: str) -> tuple[bool, bool, int, ShardPlace]:
    at = place(shard)
    return not _same_part(at, near), at[:2] != near[:2], abs(at.dp - near.dp), at


def reshape_into(state: TrainingState, old: OpenSnapshot, shard: str) -> int:
    """Fill ``state`` on the rank of ``shard`` and have it load; the number of tensors checked.

    All of them, and those are compared with whole global tensors of the old layout afterwards.
    """
    assert isinstance(state, Reshapes)
    state.expect_reshape()
    layout, live = plan_state(state), live_tensors(state)
    overwrite(live.values())
    tensors = OldTensors(old, shard)
    for entry in layout.entries:
        tensors.fill(live[entry.name], entry)
    first = min(old, key=place)
    nearest = [tensors.near[0], *([first] if tensors.near[0] != first else [])]
    origins = [(name, decode(old[name].objects)) for name in nearest]
    state.load(state.reshape_objects(shard, origins))
    return sum(_compare(live_tensors(state), layout.entries, old))


def _compare(
    live: dict[str, torch.Tensor], entries: tuple[LayoutEntry, ...], old: OpenSnapshot
) -> Iterator[int]:
    """Compare placed tensors with boxes cut out of whole global tensors; one for each."""
    parts = {name: ShardParts(one.layout, partial(_bytes, one.data)) for name, one in old.items()}
    read = cache(GlobalTensors(parts).read)
    for entry in entries:
        if entry.logical is not None:
            tensor = live[entry.name].detach()
            flat = _cut(entry.logical, read, tensor.dtype)
            part = flat[entry.logical.start :][: tensor.numel()]
            assert same_bits(part, tensor.reshape(-1)), entry.name
            yield 1


def _cut(at: LogicalPlace, read: Any, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.zeros(at.elements, dtype=dtype)
    for piece in at.pieces:
        whole = read(piece.global_name)
        assert dtype_name(whole.dtype) == dtype_name(dtype)
        window = torch.as_strided(flat, piece.shape, piece.stride, piece.offset)
        window.copy_(whole[piece.box].reshape(piece.shape))
    return flat


def _bytes(data: Any, start: int, stop: int) -> Any:
    return data[start:stop]
