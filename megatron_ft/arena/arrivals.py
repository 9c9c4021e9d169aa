"""Digests that are taken of bytes as they arrive in a data region, in parts and in any order.

The CRC of a block is the XOR of those of its parts, each moved on by the bytes behind it, so parts
may come from several threads.  A block is known when each of its bytes has been counted once;
all others are digested when the region is sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_ft.core import copy_crc, isal
from megatron_ft.core.copy_crc import CopyCrc, Parts, Words

Bytes = NDArray[np.uint8]


class Arrivals:
    """One filling of one data region.  ``pool`` digests what others than this copied."""

    def __init__(
        self, library: CopyCrc, region: Bytes, block_bytes: int, pool: Executor | None = None
    ) -> None:
        blocks = region.nbytes // block_bytes
        self._library, self._block_bytes, self._pool = library, block_bytes, pool
        self._region = region[: blocks * block_bytes]
        self._raw, self._got = np.zeros(blocks, np.uint64), np.zeros(blocks, np.uint64)
        self._first = copy_crc.address_of(self._region)
        self._to_raw, self._to_got = map(copy_crc.address_of, (self._raw, self._got))
        self._running: list[Future[None]] = []

    def copy(self, parts: Parts) -> None:
        """Make copies into the region and digest them."""
        if parts.count and not (
            self._first <= parts.first and parts.end <= self._first + self._region.nbytes
        ):
            raise ValueError("a part lies outside of its data region")
        self._library.parts(parts, self._first, self._block_bytes, self._to_raw, self._to_got)

    def read(self, targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Digest what lies at these addresses of the region by now; in the pool if there is one."""
        parts = Parts(targets, targets, lengths)
        if self._pool is None:
            self.copy(parts)
        else:
            self._running.append(self._pool.submit(self.copy, parts))

    def clear(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fill ranges of the region, given as offsets and lengths, with zeros."""
        offsets, lengths = np.array([*ranges, (0, 0)]).T
        self.copy(Parts(offsets + self._first, np.zeros_like(offsets), lengths))

    def count(self, start: int, stop: int) -> None:
        """Digest what lies between these offsets of the region, in this thread."""
        at = self._first + start
        self.copy(Parts([at], [at], [max(0, stop - start)]))

    def settle(self) -> None:
        """Wait for the pool, whatever became of its work: nothing reads the region afterwards."""
        for one in self._running:
            one.exception()

    def known(self, blocks: int) -> tuple[Words, NDArray[np.bool_]]:
        """Digests of the first ``blocks`` blocks, and which of them are right.

        Raises what a thread of the pool raised.
        """
        for one in self._running:
            one.result()
        whole = self._got[:blocks] == self._block_bytes
        return self._raw[:blocks] ^ np.uint64(_of_zeros(self._block_bytes)), whole


@lru_cache(maxsize=8)
def _of_zeros(block_bytes: int) -> int:
    return isal.crc64(np.zeros(block_bytes, np.uint8))
