"""What a member does with the row that it gathers: check sources, code, pass parities on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from megatron_ft.core.fault_points import reach
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import DataCheck, parity_digests_of
from megatron_ft.erasure.codec import Codec, open_codec
from megatron_ft.erasure.member import MemberView, StripeCode, chunk_of
from megatron_ft.erasure.pieces import SparePieces
from megatron_ft.erasure.transport import Exchange, Kind, Link, Pending

COPYING = ("xor", "replica")
"""Kinds whose parity of one data column is that column."""


def copies_only(code: StripeCode) -> bool:
    """Whether all parities of a row are its only column, which then arrives where parity 0 lies."""
    return code.kind in COPYING and code.data_members == 1


def open_row_codec(code: StripeCode) -> Codec:
    """The codec of a stripe."""
    return open_codec(code.kind, code.data_members, code.parity_members)


def encode_kernel(codec: Codec) -> Callable[[Sequence[Bytes], Sequence[Bytes]], None]:
    """All parities from all data columns."""
    data, members = codec.data_members, codec.data_members + codec.parity_members
    return codec.kernel(range(data, members), range(data))


class RowEncoder:
    """Codes the row that was gathered here: parity 0 stays, the others go to their holders.

    ``digests`` are those of our row's parities, ``arrived`` those of the parities that we keep for
    other rows, both of shape (m, blocks of a chunk).
    """

    def __init__(
        self,
        link: Link,
        code: StripeCode,
        member: MemberView,
        checks: Sequence[DataCheck],
        codec: Codec,
        spare: SparePieces,
    ) -> None:
        self._link, self._code, self._parity = link, code, member.parity
        self._checks, self._kernel = checks, encode_kernel(codec)
        self._copies = copies_only(code)
        self._spare = spare.sets(2, 0 if self._copies else code.parity_members - 1)
        self.digests = np.zeros((code.parity_members, code.chunk_blocks), np.uint64)
        self.arrived = np.zeros_like(self.digests)

    def check(self, column: int, part: slice, piece: Bytes) -> None:
        """CorruptMemberError if a source is wrong; what is parity as well is digested once."""
        source = self._code.layout.holder(self._link.member, column)
        offset = column * self._code.chunk_bytes + part.start
        if self._copies:
            digests = self._checks[source].required_digests(offset, piece)
            self.digests[:, self._code.blocks(part)] = digests
        else:
            self._checks[source].require(offset, piece)

    def code_piece(self, number: int, part: slice, columns: Sequence[Bytes]) -> None:
        """Compute all m parities of a piece, and their digests while they are in cache."""
        if not self._copies:
            self._compute(number, part, columns)
        if number == len(range(0, self._code.chunk_bytes, self._code.piece_bytes)) // 2:
            reach("encode.half")

    def _compute(self, number: int, part: slice, columns: Sequence[Bytes]) -> None:
        outputs = [self._home(0, part), *self._others(number, part)]
        self._kernel(columns, outputs)
        for parity, output in enumerate(outputs):
            digests = parity_digests_of(self._code, output)
            self.digests[parity, self._code.blocks(part)] = digests

    def passes(self, number: int, part: slice) -> Iterable[Exchange]:
        """Send parity j of our row to member + j, receive that of row member - j."""
        for j, output in enumerate(self._others(number, part), 1):
            yield Exchange(partial(self._pass, j, part, output), partial(self._note, j, part))

    def _pass(self, j: int, part: slice, output: Bytes) -> Sequence[Pending]:
        link, home = self._link, self._home(j, part)
        return [
            link.receive(home, link.member - j, Kind.RESULT),
            link.send(output, link.member + j, Kind.RESULT),
        ]

    def _note(self, j: int, part: slice) -> None:
        """Digests of parity as it has arrived here: soon, so that it need not be loaded again."""
        digests = parity_digests_of(self._code, self._home(j, part))
        self.arrived[j, self._code.blocks(part)] = digests

    def _home(self, j: int, part: slice) -> Bytes:
        return chunk_of(self._code, self._parity, j)[part]

    def _others(self, number: int, part: slice) -> list[Bytes]:
        """Where parities 1, 2, ... of our row are."""
        if self._copies:
            return [self._home(0, part)] * (self._code.parity_members - 1)
        return [piece[: part.stop - part.start] for piece in self._spare[number % 2]]
