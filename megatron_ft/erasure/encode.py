"""Compute a stripe's parity: gather each row at one member, code it, pass parities on.

A member of N sends L (N-1)/(N-m) bytes for L bytes of data, the least that is
possible; sending every chunk to all m parity holders would cost m L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_ft.erasure.checks import (
    CorruptMemberError,
    parity_digests_of,
    parity_root,
)
from megatron_ft.erasure.codec import Codec, open_codec
from megatron_ft.erasure.gather import gather_rows
from megatron_ft.erasure.introduce import agreed_records, introduce
from megatron_ft.erasure.member import (
    Digests,
    MemberView,
    StripeCode,
    chunk_of,
    spare_pieces,
)
from megatron_ft.erasure.transport import Kind, Link, Pending, Transport, Window, barrier
from megatron_ft.fault_points import reach
from megatron_ft.identity import SealedRecord
from megatron_ft.isal import Bytes


@dataclass(frozen=True)
class EncodeResult:
    """What a member stores beside its parity: the root of its digests, and everyone's record."""

    parity_root: bytes
    stripe_table: tuple[SealedRecord, ...]


def encode(
    code: StripeCode,
    member: MemberView,
    transport: Transport,
    peers: Sequence[int],
    *,
    index: int | None = None,
    codec: Codec | None = None,
) -> EncodeResult:
    """Fill ``member.parity`` and ``member.parity_digests``; all members call this together.

    ``peers`` are the members' ranks in stripe order, ``index`` says which member we are
    (needed only if one process stands for two).  Every source block is checked before
    it is coded, and received parity is read back: CorruptMemberError names the shard whose
    bytes are wrong, and the parity is then not to be used.  ValueError if members
    disagree about the snapshot or a length.  It returns on any member only once the
    parity of all of them is in place.
    """
    member.require_fit(code)
    link = Link(transport, peers, index)
    introductions = introduce(link, member)
    records = agreed_records(introductions)
    checks = [introductions[number].data_check(code) for number in range(code.members)]
    row = _RowEncoder(link, code, member, codec or open_row_codec(code))

    def check(column: int, part: slice, piece: Bytes) -> None:
        source = code.layout.holder(link.member, column)
        checks[source].require(column * code.chunk_bytes + part.start, piece)

    into = chunk_of(code, member.parity, 0) if row.copies_only else None
    gather_rows(link, code, member.data, check, row.code_piece, row.passes, into)
    member.parity_digests[:] = swap_digests(link, code, row.digests)
    _read_back(code, member)
    barrier(link)
    return EncodeResult(parity_root(member.parity_digests), records)


def open_row_codec(code: StripeCode) -> Codec:
    """The codec of a stripe."""
    return open_codec(code.kind, code.data_members, code.parity_members)


def encode_kernel(codec: Codec) -> Callable[[Sequence[Bytes], Sequence[Bytes]], None]:
    """All parities from all data columns."""
    data, members = codec.data_members, codec.data_members + codec.parity_members
    return codec.kernel(range(data, members), range(data))


def swap_digests(link: Link, code: StripeCode, computed: Digests) -> Digests:
    """Give each holder the digests of the parity that we computed for it.

    ``computed`` has shape (m, blocks of a chunk), for our row; the result is for our
    own m chunks of parity, in one piece.
    """
    mine = np.zeros_like(computed)
    mine[0] = computed[0]

    def swap(j: int) -> list[Pending]:
        return [
            link.receive(mine[j].view(np.uint8), link.member - j, Kind.DIGEST),
            link.send(computed[j].view(np.uint8), link.member + j, Kind.DIGEST),
        ]

    window = Window(link)
    for j in range(1, code.parity_members):
        window.post(partial(swap, j))
    window.drain()
    return mine.reshape(-1)


COPYING = ("xor", "replica")
"""Kinds whose parity of one data column is that column."""


class _RowEncoder:
    """Codes the row that was gathered here: parity 0 stays, the others go to their holders.

    ``copies_only`` says that the row is its own parity: it has arrived where it belongs.
    """

    def __init__(self, link: Link, code: StripeCode, member: MemberView, codec: Codec) -> None:
        self._link, self._code, self._parity = link, code, member.parity
        self._kernel = encode_kernel(codec)
        self._spare = [spare_pieces(code, code.parity_members - 1) for _ in range(2)]
        self.digests = np.zeros((code.parity_members, code.chunk_blocks), np.uint64)
        self.copies_only = code.kind in COPYING and code.members == 2

    def code_piece(self, number: int, part: slice, columns: Sequence[Bytes]) -> None:
        """Compute all m parities of a piece, and their digests while they are in cache."""
        outputs = [chunk_of(self._code, self._parity, 0)[part], *self._others(number, part)]
        if not self.copies_only:
            self._kernel(columns, outputs)
        for parity, output in enumerate(outputs):
            digests = parity_digests_of(self._code, output)
            self.digests[parity, self._code.blocks(part)] = digests
        if number == len(range(0, self._code.chunk_bytes, self._code.piece_bytes)) // 2:
            reach("encode.half")

    def passes(self, number: int, part: slice) -> Iterable[Callable[[], Sequence[Pending]]]:
        """Send parity j of our row to member + j, receive that of row member - j."""
        for j, output in enumerate(self._others(number, part), 1):
            yield self._pass(j, part, output)

    def _pass(self, j: int, part: slice, output: Bytes) -> Callable[[], Sequence[Pending]]:
        link, home = self._link, chunk_of(self._code, self._parity, j)[part]
        return lambda: [
            link.receive(home, link.member - j, Kind.RESULT),
            link.send(output, link.member + j, Kind.RESULT),
        ]

    def _others(self, number: int, part: slice) -> list[Bytes]:
        return [piece[: part.stop - part.start] for piece in self._spare[number % 2]]


def _read_back(code: StripeCode, member: MemberView) -> None:
    """Compare parity that was computed elsewhere, as it is here in memory, with its digests.

    The digests of the first chunk were taken from this memory after it was written.
    """
    assert member.record is not None
    received = member.parity[code.chunk_bytes :]
    wanted = member.parity_digests[code.chunk_blocks :]
    wrong = np.flatnonzero(parity_digests_of(code, received) != wanted)
    if wrong.size:
        block = code.chunk_blocks + int(wrong[0])
        raise CorruptMemberError(
            member.record.shard_id, "its parity is not what was computed", block
        )
