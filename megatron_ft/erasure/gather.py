"""Bring a stripe's rows together at their first parity holders, piece by piece.

Member x gathers row x: each of the other rows' holders of data sends it one chunk, so
every chunk travels once.  Steps are permutations (everyone sends to one member and
receives from one), and buffers are a few sets of pieces whatever the data's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import StripeCode, chunk_of
from megatron_ft.erasure.pieces import SparePieces
from megatron_ft.erasure.transport import (
    EXCHANGES_IN_FLIGHT,
    Ahead,
    Exchange,
    Kind,
    Link,
    Pending,
    Window,
    buffer_sets,
)

OnColumn = Callable[[int, slice, Bytes], None]
"""Called with (column, part of the chunk, bytes) when a source piece has arrived."""

OnRow = Callable[[int, slice, Sequence[Bytes]], None]
"""Called with (piece number, part of the chunk, all k columns) when a row's piece is whole."""

Passes = Callable[[int, slice], Iterable[Exchange]]
"""What else to exchange, once a piece of the row was handled."""


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
        self._window = Window(link)
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
            lambda: [link.receive(buffer, source, Kind.SOURCE), *self._given.due()],
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
        return [self._link.send(mine, target, Kind.SOURCE)]

    def _arrived(self, number: int, part: slice, column: int) -> None:
        self._on_column(column, part, self._column(number, part, column))
        if column == self._code.data_members - 1:
            columns = range(self._code.data_members)
            self._on_row(number, part, [self._column(number, part, c) for c in columns])

    def _column(self, number: int, part: slice, column: int) -> Bytes:
        if self._into is not None:
            return self._into[part]
        return self._spare[number % len(self._spare)][column][: part.stop - part.start]
