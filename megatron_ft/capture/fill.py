"""Copies from a mapped region into live tensors, each block verified just before it is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ft.arena.digest import BlockCheck, Bytes
from megatron_ft.capture.copier import CopyItem, batches
from megatron_ft.capture.cpu import move_serially
from megatron_ft.capture.threads import spare_threads

PIECE_BYTES = 16 << 20
"""What one thread copies at a time of what needs more than a copy of bytes."""

CHUNK_BYTES = 512 << 10
"""What is verified and then copied, at least one block: a core's cache keeps it meanwhile."""


class Spans(NamedTuple):
    """Bytes to copy: the targets' addresses, the offsets in the region, and how many."""

    targets: list[int]
    offsets: list[int]
    lengths: list[int]

    def add(self, target: int, offset: int, length: int) -> None:
        """One more."""
        for column, number in zip(self, (target, offset, length), strict=True):
            column.append(number)


class Copies(NamedTuple):
    """What a restore copies: plain bytes, and tensors that need more than that.

    The spans' targets must stay where they are until all was copied.
    """

    spans: Spans
    items: list[CopyItem]


class Chunk(NamedTuple):
    """Blocks from ``first`` to before ``stop``, and what of the spans lies in them, as tuples."""

    first: int
    stop: int
    pieces: list[tuple[int, int, int]]


def chunk_blocks(block_bytes: int) -> int:
    """How many blocks a chunk has."""
    return max(1, CHUNK_BYTES // block_bytes)


def chunks_of(spans: Spans, blocks: int, block_bytes: int) -> list[Chunk]:
    """All blocks, in order, with the spans cut to where they lie."""
    step = chunk_blocks(block_bytes)
    numbers, pieces = _cut(spans, step * block_bytes)
    firsts = range(0, blocks, step)
    ends = np.searchsorted(numbers, np.arange(len(firsts) + 1)).tolist()
    return [
        Chunk(at, min(at + step, blocks), pieces[first:stop])
        for at, first, stop in zip(firsts, ends, ends[1:], strict=False)
    ]


def _cut(spans: Spans, size: int) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
    """Spans cut at multiples of ``size``, in the order of the numbers of these, which come first.

    Computed for all at once: a loop over thousands of tensors takes milliseconds.
    """
    targets, offsets, lengths = (np.array(column, np.int64) for column in spans)
    first, end = offsets // size, offsets + lengths
    counts = np.where(lengths > 0, (end - 1) // size - first + 1, 0)
    of = np.repeat(np.arange(counts.size), counts)
    numbers = first[of] + np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.maximum(offsets[of], numbers * size)
    stop = np.minimum(end[of], (numbers + 1) * size)
    order = np.argsort(numbers, kind="stable")
    columns = (targets[of] + start - offsets[of], start, stop - start)
    return numbers[order], list(zip(*(one[order].tolist() for one in columns), strict=True))


class VerifiedCopy:
    """Copies chunks of one region, none of them before its digests were found right."""

    def __init__(self, region: Bytes, check: BlockCheck, verified_from: int) -> None:
        """Blocks from ``verified_from`` on were compared with their digests already."""
        self._check, self._verified_from = check, verified_from
        self._region, self._start = region, region.ctypes.data

    def run(self, chunks: Sequence[Chunk]) -> list[int]:
        """The blocks that are not as they were sealed; nothing is copied out of their chunks.

        All chunks are looked at, with this rank's share of the cores.
        """
        left, bad = iter(chunks), list[int]()

        def work() -> None:
            for chunk in left:
                found = self._bad(chunk)
                bad.extend(found)
                if not found:
                    self._copy(chunk.pieces)

        _in_threads(work)
        return sorted(bad)

    def _bad(self, chunk: Chunk) -> list[int]:
        stop = min(chunk.stop, self._verified_from)
        return self._check.bad(chunk.first, stop) if chunk.first < stop else []

    def _copy(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        start, copy = self._start, ctypes.memmove
        for target, offset, length in pieces:
            copy(target, start + offset, length)


def copy_in_threads(items: Iterable[CopyItem]) -> None:
    """Copy what needs more than a copy of bytes; its bytes must have been verified."""
    left: Iterator[list[CopyItem]] = iter(list(batches(items, PIECE_BYTES)))

    def work() -> None:
        # In each thread: the mode belongs to the thread.
        with torch.no_grad():
            for batch in left:
                move_serially(batch)

    _in_threads(work)


def _in_threads(work: Callable[[], None]) -> None:
    """Run it in as many threads as this rank may use, this one included; raises the first error."""
    others = spare_threads() - 1
    if others == 0:
        return work()
    with ThreadPoolExecutor(others) as pool:
        running = [pool.submit(work) for _ in range(others)]
        work()
        for one in running:
            one.result()
