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
    DataCheck,
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
from megatron_ft.erasure.transport import (
    Exchange,
    Kind,
    Link,
    Pending,
    Transport,
    Window,
    barrier,
)
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
    row = _RowEncoder(link, code, member, checks, codec or open_row_codec(code))
    into = chunk_of(code, member.parity, 0) if row.copies_only else None
    gather_rows(link, code, member.data, row.check, row.code_piece, row.passes, into)
    member.parity_digests[:] = swap_digests(link, code, row.digests)
    _require_arrived(code, member, row.arrived)
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

    ``digests`` are those of our row's parities, ``arrived`` those of the parities that we keep for
    other rows, both of shape (m, blocks of a chunk).
    ``copies_only`` says that all parities of a row are its only column, which has arrived where
    parity 0 belongs.
    """

    def __init__(
        self,
        link: Link,
        code: StripeCode,
        member: MemberView,
        checks: Sequence[DataCheck],
        codec: Codec,
    ) -> None:
        self._link, self._code, self._parity = link, code, member.parity
        self._checks, self._kernel = checks, encode_kernel(codec)
        self.copies_only = code.kind in COPYING and code.data_members == 1
        spare = 0 if self.copies_only else code.parity_members - 1
        self._spare = [spare_pieces(code, spare) for _ in range(2)]
        self.digests = np.zeros((code.parity_members, code.chunk_blocks), np.uint64)
        self.arrived = np.zeros_like(self.digests)

    def check(self, column: int, part: slice, piece: Bytes) -> None:
        """CorruptMemberError if a source is wrong; what is parity as well is digested once."""
        source = self._code.layout.holder(self._link.member, column)
        offset = column * self._code.chunk_bytes + part.start
        if self.copies_only:
            digests = self._checks[source].required_digests(offset, piece)
            self.digests[:, self._code.blocks(part)] = digests
        else:
            self._checks[source].require(offset, piece)

    def code_piece(self, number: int, part: slice, columns: Sequence[Bytes]) -> None:
        """Compute all m parities of a piece, and their digests while they are in cache."""
        if not self.copies_only:
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
        if self.copies_only:
            return [self._home(0, part)] * (self._code.parity_members - 1)
        return [piece[: part.stop - part.start] for piece in self._spare[number % 2]]


def _require_arrived(code: StripeCode, member: MemberView, arrived: Digests) -> None:
    """Compare parity that was computed elsewhere, as it is here in memory, with its digests.

    The digests of the first chunk were taken from this memory after it was written.
    """
    assert member.record is not None
    wanted = member.parity_digests[code.chunk_blocks :]
    wrong = np.flatnonzero(arrived[1:].reshape(-1) != wanted)
    if wrong.size:
        block = code.chunk_blocks + int(wrong[0])
        raise CorruptMemberError(
            member.record.shard_id, "its parity is not what was computed", block
        )
