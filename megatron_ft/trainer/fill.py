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
from megatron_ft.core.fault_points import reach
from megatron_ft.trainer.copier import CopyItem, batches, spare_threads
from megatron_ft.trainer.cpu import copy_large, move_serially

PIECE_BYTES = 16 << 20
"""Bytes that one thread copies at a time where a copy of bytes is not enough."""

CHUNK_BYTES = 2 << 20
"""Bytes that are verified and then copied, at least one block: caches keep them meanwhile."""

UNIT_BYTES = 16 << 20
"""Bytes that the library verifies and copies in one call, block by block."""

LARGE_BYTES = 1 << 20
"""From this length on a faster copy is worth the 14 us that it takes to begin."""


def chunk_blocks(block_bytes: int) -> int:
    """Number of blocks of a chunk: one where the library copies each block behind its check."""
    return 1 if copy_crc.load() else max(1, CHUNK_BYTES // block_bytes)


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
        cls, offsets: list[int], lengths: list[int], blocks: int, block_bytes: int, step: int = 0
    ) -> BlockRanges:
        """Cut all spans at once: a loop over thousands of tensors takes milliseconds.

        A chunk has ``step`` blocks, 0 for ``chunk_blocks``.
        """
        step = step or chunk_blocks(block_bytes)
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
        self._check, self._cuts, self._block_bytes = check, cuts, check.block_bytes
        self._library = copy_crc.load()
        pieces = cuts.to(targets), cuts.offsets + region.ctypes.data, cuts.lengths
        self._rows = np.array(pieces, np.uint64).T.copy()
        self._pieces = [] if self._library else [one.tolist() for one in pieces]
        # Sources are addresses in it.
        self._kept = region

    def run(self, threads: int = 0) -> list[int]:
        """Copy all chunks; returns the bad blocks, out of whose chunks nothing is copied.

        All are checked, by so many threads; 0: by the machine.
        """
        chunks, bad = self._cuts.chunks, list[int]()
        step = max(1, UNIT_BYTES // self._block_bytes) if self._library else 1
        left, middle = iter(chunks[::step]), chunks[len(chunks) // 2 // step * step :][:1]

        def work() -> None:
            for first in left:
                if first in middle:
                    reach("restore.half")
                bad.extend(self._take(first, min(first + step, len(chunks))))

        in_threads(work, threads)
        return sorted(bad)

    def _take(self, first: int, stop: int) -> list[int]:
        """Verify and copy chunks; the bad blocks."""
        cuts, library = self._cuts, self._library
        if library is not None:
            ends = np.array(cuts.ends[first : stop + 1], np.uint64)
            parts = self._rows[cuts.ends[first] : cuts.ends[stop]]
            return self._check.copy(library, first, stop, parts, ends[1:] - ends[0])
        blocks = cuts.blocks_of(first)
        found = self._check.bad(blocks.start, blocks.stop)
        if not found:
            self._copy(cuts.ends[first], cuts.ends[stop])
        return found

    def _copy(self, first: int, stop: int) -> None:
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
