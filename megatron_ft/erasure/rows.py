"""Rows of a stripe: gathered piece by piece at their first parity holders.

Member x gathers row x: each of the other rows' holders of data sends it one chunk, so
every chunk travels once.  Steps are permutations (everyone sends to one member and
receives from one).  Buffers are a few sets of pieces whatever the data's length, and all the
memory that a coder needs.  They are kept from one operation to the next, in huge pages where
there are any: faulting them in anew was a quarter of the processor time of a short encode.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from types import TracebackType

import numpy as np

from megatron_ft.arena.mapping import huge_page_bytes
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import StripeCode, chunk_of
from megatron_ft.erasure.transport import (
    EXCHANGES_IN_FLIGHT,
    Ahead,
    Exchange,
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
    buffer_sets,
)

_LINE_BYTES = 64
_STAGGER_BYTES = 5 * _LINE_BYTES
"""An odd number of lines: all 64 places in a page are taken before one is taken twice."""


class SparePieces:
    """Buffers of one operation on a stripe, which serve the next one once it has left the block.

    After an error they do not: a transfer may still be writing there.
    """

    def __init__(self, code: StripeCode, length: int = 0) -> None:
        """Make buffers of ``length`` bytes, by default ``code.piece_bytes``, at most a chunk."""
        self._size = min(length or code.piece_bytes, code.chunk_bytes)
        self._taken: list[mmap.mmap] = []

    def sets(self, sets: int, count: int) -> list[list[Bytes]]:
        """Take ``sets`` sets of ``count`` buffers; their content is undefined."""
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
        """Give all buffers back; nobody may use them any more."""
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
        """Take a region of at least ``size`` bytes that nobody else uses."""
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
    """New memory in huge pages; a rest at its end has small pages, as far as it is used."""
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = size // huge_page_bytes() * huge_page_bytes()
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return region


_kept = _Kept()


OnColumn = Callable[[int, slice, Bytes], None]
"""Called with (column, part of the chunk, bytes) when a source piece has arrived."""

OnRow = Callable[[int, slice, Sequence[Bytes]], None]
"""Called with (piece number, part of the chunk, all k columns) when a row's piece is whole."""

Passes = Callable[[int, slice], Iterable[Exchange]]
"""Gives further exchanges, once a piece of the row was handled."""


def gather_rows(
    link: Link,
    code: StripeCode,
    data: Bytes,
    on_column: OnColumn,
    on_row: OnRow,
    passes: Passes,
    spare: SparePieces,
    into: Bytes | None = None,
) -> None:
    """Gather this member's row and give its own chunks to the other rows.

    Columns are received into ``spare`` pieces; the only column of a row may be received ``into``
    a place of its own, a chunk long.

    The results of a piece are passed on after some of the next piece's columns were
    started, so that transfers are always under way while a piece is coded.
    """
    assert into is None or code.data_members == 1
    gathering = _Gathering(link, code, data, on_column, on_row, spare, into)
    first = min(EXCHANGES_IN_FLIGHT - 1, code.data_members)
    results: list[Exchange] = []
    for number, part in enumerate(code.pieces()):
        for column in range(first):
            gathering.post(number, part, column)
        gathering.pass_on(results, first)
        for column in range(first, code.data_members):
            gathering.post(number, part, column)
        results = list(passes(number, part))
    gathering.pass_on(results, 0)
    gathering.finish()


class _Gathering:
    def __init__(
        self,
        link: Link,
        code: StripeCode,
        data: Bytes,
        on_column: OnColumn,
        on_row: OnRow,
        spare: SparePieces,
        into: Bytes | None,
    ) -> None:
        self._window = ExchangeWindow(link)
        self._link, self._code, self._data = link, code, data
        self._on_column, self._on_row = on_column, on_row
        self._into = into
        columns = code.data_members if into is None else 0
        self._spare = spare.sets(buffer_sets(code.data_members), columns)
        turns = product(code.pieces(), range(code.data_members))
        self._given = Ahead(partial(self._give, *turn) for turn in turns)

    def post(self, number: int, part: slice, column: int) -> None:
        """Exchange one column's piece: ours goes to its row, another's comes to ours."""
        link, layout = self._link, self._code.layout
        buffer = self._column(number, part, column)
        source = layout.holder(link.member, column)
        self._window.post(
            lambda: [link.receive(buffer, source, MessageKind.SOURCE), *self._given.due()],
            lambda: self._arrived(number, part, column),
        )

    def pass_on(self, results: Sequence[Exchange], later: int) -> None:
        """Exchange the results of a row, after which ``later`` columns were posted."""
        if results:
            self._window.settle(later)
        for exchange in results:
            self._window.post(*exchange)

    def finish(self) -> None:
        """Wait for all that is under way."""
        self._window.drain()
        self._link.wait(self._given.rest())

    def _give(self, part: slice, column: int) -> Sequence[Pending]:
        """Start sending one of our chunks' pieces to the row that it belongs to."""
        target = self._code.layout.data_row(self._link.member, column)
        mine = chunk_of(self._code, self._data, column)[part]
        return [self._link.send(mine, target, MessageKind.SOURCE)]

    def _arrived(self, number: int, part: slice, column: int) -> None:
        self._on_column(column, part, self._column(number, part, column))
        if column == self._code.data_members - 1:
            columns = range(self._code.data_members)
            self._on_row(number, part, [self._column(number, part, c) for c in columns])

    def _column(self, number: int, part: slice, column: int) -> Bytes:
        if self._into is not None:
            return self._into[part]
        return self._spare[number % len(self._spare)][column][: part.stop - part.start]
