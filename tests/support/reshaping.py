"""A snapshot of one layout, filled into live tensors of another: the plan, carried out by torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from msgspec.structs import replace

from megatron_ft.checkpoint.captured import GlobalTensors, StoredTensors
from megatron_ft.checkpoint.source import OpenSnapshot, ShardParts
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import LayoutEntry, LogicalPlace, ShardLayout
from megatron_ft.erasure.reshape_plan import OldTensors, origins_of, windows
from megatron_ft.trainer.plan import dtype_name, plan_state
from megatron_ft.trainer.state import Reshapes, TrainingState, live_tensors, same_bits
from tests.support.late_capture import overwrite


def fill_live(
    live: dict[str, torch.Tensor], layout: ShardLayout, shard: str, old: OpenSnapshot
) -> None:
    """Fill the whole of each live tensor by the product's plan; each element is written once."""
    layouts = {name: one.layout for name, one in old.items()}
    plan = OldTensors(layouts, {name: number for number, name in enumerate(layouts)})
    stored = StoredTensors(old)
    # Of a tensor that replicas share, all is filled here and not the part of this rank.
    whole = [replace(e, start=0, stop=live[e.name].numel()) for e in layout.entries]
    # As a new arena; what is no part of a model, such as padding, stays so.
    flat = {e.name: torch.zeros(e.stop, dtype=live[e.name].dtype) for e in whole if not e.alias_of}
    written = {name: torch.zeros(len(values)) for name, values in flat.items()}
    wanted = {name: torch.zeros(len(values)) for name, values in flat.items()}
    for entry in whole:
        for window in () if entry.alias_of else windows(entry):
            at = window.box.shape, window.stride, window.offset
            torch.as_strided(wanted[entry.name], *at).fill_(1)
    for copy, entry in plan.fills(shard, replace(layout, entries=tuple(whole)), 0):
        source = stored.flat(*copy.source)
        first = source.storage_offset() + copy.source_offset
        taken = torch.as_strided(source, copy.shape, copy.source_stride, first)
        target = copy.shape, copy.stride, copy.offset
        torch.as_strided(flat[entry.name], *target).copy_(taken)
        torch.as_strided(written[entry.name], *target).add_(1)
    for name, values in flat.items():
        assert torch.equal(written[name], wanted[name]), f"{name} is not filled once"
        live[name].detach().copy_(values.view(live[name].shape))


def reshape_into(state: TrainingState, old: OpenSnapshot, shard: str) -> int:
    """Fill ``state`` on the rank of ``shard`` and have it load; the number of tensors checked.

    All of them, and those are compared with whole global tensors of the old layout afterwards.
    """
    assert isinstance(state, Reshapes)
    state.expect_reshape()
    layout, live = plan_state(state), live_tensors(state)
    overwrite(live.values())
    fill_live(live, layout, shard, old)
    origins = [(name, decode(old[name].objects)) for name in origins_of(shard, sorted(old))]
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
