"""Restores out of an arena, against a plain copy of the same bytes."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from benchmarks.capturing import MEBI, Capturing
from benchmarks.rounds import ratios
from benchmarks.table import Row
from megatron_ft.arena.arena import Arena
from megatron_ft.trainer.binding import region_tensor, stored_view
from megatron_ft.trainer.copier import spare_threads
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.restore import SealedShard, restore_shard
from megatron_ft.trainer.state import live_tensors, same_bits


def require_right(captures: Capturing) -> None:
    """RuntimeError unless what was captured, and what is restored of it, is the state bit by bit.

    Figures of copies that bring other bytes are none.
    """
    live = live_tensors(captures.state)
    _require_same(captures, live)
    for tensor in live.values():
        tensor.zero_()
    _restored(captures, live)
    _require_same(captures, live)


def _require_same(captures: Capturing, live: dict[str, torch.Tensor]) -> None:
    region = region_tensor(captures.engine.arena.data(0))
    for entry in captures.engine.binding.layout.entries:
        if not same_bits(stored_view(region, entry), live[entry.name].cpu()):
            raise RuntimeError(f"{entry.name} was not copied as it is")


def into_warm_memory(
    rounds: int,
    device: str,
    words: str,
    captures: Capturing,
    copy: Callable[[], object],
    limit: float,
) -> Iterator[Row]:
    """Into tensors that were used before: of models, which scripts fill with first values.

    As in a restarted trainer: the arena is mapped anew, so its pages are faulted in.
    """
    live = live_tensors(captures.state)
    bound = limit if device == "cpu" else None
    samples = ratios(rounds, copy, lambda: _restored(captures, live))
    threads = f"{spare_threads()} threads"
    note = f"verified as it is copied; arena mapped anew, tensors warm, {threads}"
    yield Row(f"restore, {words}", samples, "x copy", bound, note=note)


def into_new_memory(mib: int, rounds: int, words: str, captures: Capturing) -> Row:
    """Of what exists only after a restore, such as an optimizer's moments; compared with a copy
    into such memory, but out of memory that is mapped."""
    live, source = live_tensors(captures.state), torch.rand(mib * MEBI // 4)
    samples = ratios(
        rounds,
        lambda: new_tensors([source.numel()])[0].copy_(source),
        lambda: _restored(captures, _in_new_memory(live)),
    )
    note = "arena mapped anew; tensors in new memory, and so is the copy"
    return Row(f"restore into new memory, {words}", samples, "x copy", 0.9, note=note)


def _in_new_memory(live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(live, new_tensors([one.numel() for one in live.values()]), strict=True))


def new_tensors(sizes: list[int]) -> list[torch.Tensor]:
    """float32 tensors in one mapping whose pages do not exist before somebody writes to them."""
    memory = torch.frombuffer(mmap.mmap(-1, 4 * sum(sizes)), dtype=torch.float32)
    ends = accumulate(sizes)
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _restored(captures: Capturing, state: dict[str, torch.Tensor]) -> float:
    """Seconds of one restore from the slot that was captured last."""
    record = captures.record
    assert record is not None
    adapted = MappingState(state)
    started = time.perf_counter()
    arena = Arena.open(captures.engine.arena.path)
    shard = SealedShard(arena, 0, record, lambda blocks: None)
    restore_shard(shard, adapted)
    del shard
    closing = arena.close_beside()
    if next(iter(state.values())).is_cuda:
        torch.cuda.synchronize()
    ended = time.perf_counter()
    closing.join()
    return ended - started
