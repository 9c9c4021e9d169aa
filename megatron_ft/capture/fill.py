"""Copies from a mapped region into live tensors, each block verified just before it is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatron_ft.arena.digest import BlockCheck, Bytes
from megatron_ft.capture.copier import CopyItem, batches
from megatron_ft.capture.cpu import move_serially
from megatron_ft.capture.threads import spare_threads

PIECE_BYTES = 16 << 20
"""What one thread copies at a time of what needs more than a copy of bytes."""

CHUNK_BYTES = 512 << 10
"""What is verified and then copied, at least one block: a core's cache keeps it meanwhile."""


class Span(NamedTuple):
    """Bytes to copy: the target's address, the offset in the region, and how many."""

    target: int
    offset: int
    length: int


class Copies(NamedTuple):
    """What a restore copies: plain bytes, and tensors that need more than that.

    The spans' targets must stay where they are until all was copied.
    """

    spans: list[Span]
    items: list[CopyItem]


class Chunk(NamedTuple):
    """Blocks from ``first`` to before ``stop``, and what of the spans lies in them, as tuples."""

    first: int
    stop: int
    pieces: list[tuple[int, int, int]]


def chunk_blocks(block_bytes: int) -> int:
    """How many blocks a chunk has."""
    return max(1, CHUNK_BYTES // block_bytes)


def chunks_of(spans: Iterable[Span], blocks: int, block_bytes: int) -> list[Chunk]:
    """All blocks, in order, with the spans cut to where they lie."""
    step = chunk_blocks(block_bytes)
    made = [Chunk(at, min(at + step, blocks), []) for at in range(0, blocks, step)]
    size = step * block_bytes
    for target, offset, length in spans:
        at, end = offset, offset + length
        while at < end:
            number = at // size
            stop = (number + 1) * size if end > (number + 1) * size else end
            made[number].pieces.append((target + at - offset, at, stop - at))
            at = stop
    return made


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
    """Run it in as many threads as this rank may use; the first error is raised."""
    threads = spare_threads()
    with ThreadPoolExecutor(threads) as pool:
        for running in [pool.submit(work) for _ in range(threads)]:
            running.result()
