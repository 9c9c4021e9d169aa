"""Copies from a mapped region into live tensors, each block verified just before it is copied."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ft.arena.digest import BlockCheck, Bytes
from megatron_ft.core import copy_crc
from megatron_ft.core.copy_crc import Parts
from megatron_ft.core.fault_points import reach
from megatron_ft.trainer.copier import CopyItem, batches, spare_threads
from megatron_ft.trainer.cpu import copy_large, move_serially

PIECE_BYTES = 16 << 20
"""Bytes that one thread copies at a time where a copy of bytes is not enough."""

CHUNK_BYTES = 2 << 20
"""Bytes that are verified and then copied, at least one block: caches keep them meanwhile."""

LARGE_BYTES = 1 << 20
"""From this length on a faster copy is worth the 14 us that it takes to begin."""


def chunk_blocks(block_bytes: int) -> int:
    """Number of blocks of a chunk."""
    return max(1, CHUNK_BYTES // block_bytes)


class BlockRanges(NamedTuple):
    """Spans of a region, cut where chunks of its blocks end, chunk by chunk.

    Made of the region alone: the targets of the spans are given later.
    """

    blocks: int
    step: int
    ends: list[int]
    spans: NDArray[np.int64]
    skipped: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(
        cls, offsets: list[int], lengths: list[int], blocks: int, block_bytes: int
    ) -> BlockRanges:
        """Cut all spans at once: a loop over thousands of tensors takes milliseconds."""
        step = chunk_blocks(block_bytes)
        width, at = step * block_bytes, np.array(offsets, np.int64)
        end, first = at + np.array(lengths, np.int64), at // width
        counts = np.where(end > at, (end - 1) // width - first + 1, 0)
        spans = np.repeat(np.arange(counts.size), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        chunks = first[spans] + np.arange(spans.size) - before
        order = np.argsort(chunks, kind="stable")
        spans, chunks = spans[order], chunks[order]
        start = np.maximum(at[spans], chunks * width)
        stop = np.minimum(end[spans], (chunks + 1) * width)
        ends = np.searchsorted(chunks, np.arange(-(-blocks // step) + 1)).tolist()
        return cls(blocks, step, ends, spans, start - at[spans], start, stop - start)

    @property
    def chunks(self) -> range:
        """Numbers of the chunks, which together have all blocks."""
        return range(len(self.ends) - 1)

    def blocks_of(self, chunk: int) -> range:
        """Numbers of the blocks of one chunk."""
        first = chunk * self.step
        return range(first, min(first + self.step, self.blocks))

    def to(self, targets: list[int]) -> NDArray[np.int64]:
        """The addresses of the pieces if the spans go to these addresses."""
        return np.array(targets, np.int64)[self.spans] + self.skipped


class VerifiedCopy:
    """Copies chunks of one region, none of them before its digests were found right."""

    def __init__(
        self, region: Bytes, check: BlockCheck, cuts: BlockRanges, targets: list[int]
    ) -> None:
        """``targets``: the addresses of the spans that ``cuts`` were made of."""
        self._check, self._cuts = check, cuts
        pieces = cuts.to(targets), cuts.offsets + region.ctypes.data, cuts.lengths
        self._rows, self._pieces = np.array(pieces), [one.tolist() for one in pieces]
        # Sources are addresses in it.
        self._kept = region

    def run(self, threads: int = 0) -> list[int]:
        """Copy all chunks; returns the bad blocks, out of whose chunks nothing is copied.

        All are checked, by so many threads; 0: by the machine.
        """
        left, bad, cuts = iter(self._cuts.chunks), list[int](), self._cuts
        middle = len(cuts.chunks) // 2

        def work() -> None:
            for chunk in left:
                if chunk == middle:
                    reach("restore.half")
                blocks = cuts.blocks_of(chunk)
                found = self._check.bad(blocks.start, blocks.stop)
                if found:
                    bad.extend(found)
                else:
                    self._copy(cuts.ends[chunk], cuts.ends[chunk + 1])

        in_threads(work, threads)
        return sorted(bad)

    def _copy(self, first: int, stop: int) -> None:
        if (library := copy_crc.load()) is not None:
            return library.stream(Parts(*self._rows[:, first:stop]))
        columns = [column[first:stop] for column in self._pieces]
        # No bytecode between the calls: other threads wait while this one holds the GIL.
        large = min(columns[2], default=0) >= LARGE_BYTES
        deque(map(copy_large if large else ctypes.memmove, *columns), 0)


def copy_in_threads(items: Iterable[CopyItem], threads: int = 0) -> None:
    """Copy what needs more than a copy of bytes; its bytes must have been verified.

    All that was begun on the targets' devices is finished before.
    """
    planned = list(batches(items, PIECE_BYTES))
    _await_devices(target for batch in planned for _, target in batch)
    left: Iterator[list[CopyItem]] = iter(planned)

    def work() -> None:
        # In each thread: the mode belongs to the thread.
        with torch.no_grad():
            for batch in left:
                move_serially(batch)

    in_threads(work, threads)


def _await_devices(targets: Iterable[torch.Tensor]) -> None:
    """Wait for all streams: a thread has others than its caller, on which first values may come."""
    for device in {target.device for target in targets if target.is_cuda}:
        torch.cuda.synchronize(device)


def in_threads(work: Callable[[], None], threads: int = 0) -> None:
    """Run it in so many threads, this one included; raises the first error.  0: by the machine."""
    others = (threads or spare_threads()) - 1
    if others == 0:
        return work()
    with ThreadPoolExecutor(others) as pool:
        running = [pool.submit(work) for _ in range(others)]
        work()
        for one in running:
            one.result()
