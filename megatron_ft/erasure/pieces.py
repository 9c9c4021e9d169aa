"""Buffers for the pieces in which chunks travel and are coded.

They are all the memory that a coder needs, whatever the length of the data.  They are kept from
one operation to the next, in huge pages where there are any: faulting them in anew was a quarter
of the processor time of a short encode.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from types import TracebackType

import numpy as np

from megatron_ft.arena.huge_pages import huge_page_bytes
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import StripeCode

_LINE_BYTES = 64
_STAGGER_BYTES = 5 * _LINE_BYTES
"""An odd number of lines: all 64 places in a page are taken before one is taken twice."""


class SparePieces:
    """Buffers of one operation on a stripe, which serve the next one once it has left the block.

    After an error they do not: a transfer may still be writing there.
    """

    def __init__(self, code: StripeCode, length: int = 0) -> None:
        """Of ``length`` bytes, by default ``code.piece_bytes``; never longer than a chunk."""
        self._size = min(length or code.piece_bytes, code.chunk_bytes)
        self._taken: list[mmap.mmap] = []

    def sets(self, sets: int, count: int) -> list[list[Bytes]]:
        """So many sets of ``count`` buffers, which hold anything."""
        if not sets * count:
            return [[] for _ in range(sets)]
        self._taken.append(_kept.take(_room(sets * count, self._size)))
        region = np.frombuffer(self._taken[-1], np.uint8)
        pieces = buffers_apart(sets * count, self._size, region)
        return [pieces[first : first + count] for first in range(0, sets * count, count)]

    def __enter__(self) -> SparePieces:
        """Nothing is taken yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Give all back; whoever took a buffer must not use it any more."""
        if kind is None:
            _kept.give_back(self._taken)
        self._taken = []


def buffers_apart(count: int, length: int, region: Bytes | None = None) -> list[Bytes]:
    """Buffers that a kernel reads side by side, placed so that they do not push each other out.

    Each begins on a cache line, and at another line of its page than those beside it: a cache
    has room for few lines of one place in the page, 8 in most first-level caches.  They lie in
    ``region``, or in new memory.
    """
    region = np.empty(_room(count, length), np.uint8) if region is None else region
    stride = length + _STAGGER_BYTES
    first = -region.ctypes.data % _LINE_BYTES
    starts = range(first, first + count * stride, stride)
    return [region[start : start + length] for start in starts]


def held_bytes() -> int:
    """Bytes of all memory for pieces, in use or kept; Python's own tracing does not see it."""
    return _kept.held


def _room(count: int, length: int) -> int:
    return count * (length + _STAGGER_BYTES) + _LINE_BYTES


class _Kept:
    """Regions that nobody uses.  Several threads may ask."""

    def __init__(self) -> None:
        self._lock, self._free = threading.Lock(), list[mmap.mmap]()
        self.held = 0

    def take(self, size: int) -> mmap.mmap:
        """At least so many bytes that nobody else has."""
        with self._lock:
            found = min((f for f in self._free if len(f) >= size), key=len, default=None)
            if found is None:
                self.held += size
                return _in_huge_pages(size)
            self._free.remove(found)
            return found

    def give_back(self, regions: list[mmap.mmap]) -> None:
        with self._lock:
            self._free.extend(regions)


def _in_huge_pages(size: int) -> mmap.mmap:
    """New memory; what is no whole huge page at its end has small ones, as far as it is used."""
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = size // huge_page_bytes() * huge_page_bytes()
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return region


_kept = _Kept()
