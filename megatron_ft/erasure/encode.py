"""Parity of a stripe, computed or verified: gather each row at one member, code it, pass on.

A member of N sends L (N-1)/(N-m) bytes for L bytes of data, the least that is possible; sending
every chunk to all m parity holders would cost m L.  Verifying gathers and codes in the same way and
changes nothing: only digests of the computed parity travel to its holders, who compare them with
their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from megatron_ft.core.background import Pace
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.codec import Codec
from megatron_ft.erasure.handshake import Introduction, agreed_records, introduce
from megatron_ft.erasure.member import (
    Check,
    CorruptMemberError,
    Digests,
    MemberView,
    StripeCode,
    chunk_of,
    parity_digests_of,
    parity_root,
)
from megatron_ft.erasure.rows import (
    RowEncoder,
    SparePieces,
    copies_only,
    encode_kernel,
    gather_rows,
    open_row_codec,
)
from megatron_ft.erasure.transport import (
    Exchange,
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
    Transport,
    barrier,
    exchange,
)


@dataclass(frozen=True)
class EncodeResult:
    """Values that a member stores beside its parity: its digests' root, and all records."""

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
    pace: Pace | None = None,
) -> EncodeResult:
    """Fill ``member.parity`` and ``member.parity_digests``; all members call this together.

    ``peers`` are the members' ranks in stripe order, ``index`` says which member we are
    (needed only if one process stands for two); ``pace`` caps what is sent.  Every source block is
    checked before it is coded, and received parity is read back: CorruptMemberError names the shard
    whose bytes are wrong, and the parity is then not to be used.  ValueError if members
    disagree about the snapshot or a length.  It returns on any member only once the
    parity of all of them is in place.
    """
    member.require_fit(code)
    link = Link(transport, peers, index, pace)
    introductions = introduce(link, member)
    records = agreed_records(introductions)
    checks = [introductions[number].data_check(code) for number in range(code.members)]
    into = chunk_of(code, member.parity, 0) if copies_only(code) else None
    with SparePieces(code) as spare:
        row = RowEncoder(link, code, member, checks, codec or open_row_codec(code), spare)
        gather_rows(link, code, member.data, row.check, row.code_piece, row.passes, spare, into)
    member.parity_digests[:] = swap_digests(link, code, row.digests)
    _require_arrived(code, member, row.arrived)
    barrier(link)
    return EncodeResult(parity_root(member.parity_digests), records)


def swap_digests(link: Link, code: StripeCode, computed: Digests) -> Digests:
    """Give each holder the digests of the parity that we computed for it.

    ``computed`` has shape (m, blocks of a chunk), for our row; the result is for our
    own m chunks of parity, in one piece.
    """
    mine = np.zeros_like(computed)
    mine[0] = computed[0]

    def swap(j: int) -> list[Pending]:
        return [
            link.receive(mine[j].view(np.uint8), link.member - j, MessageKind.DIGEST),
            link.send(computed[j].view(np.uint8), link.member + j, MessageKind.DIGEST),
        ]

    window = ExchangeWindow(link)
    for j in range(1, code.parity_members):
        window.post(partial(swap, j))
    window.drain()
    return mine.reshape(-1)


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


@dataclass(frozen=True)
class VerifyResult:
    """Shards whose bytes are wrong, in stripe order; the same on every member."""

    corrupt_data: tuple[str, ...]
    corrupt_parity: tuple[str, ...]

    @property
    def corrupt(self) -> tuple[str, ...]:
        """Every shard with anything wrong, once."""
        return tuple(dict.fromkeys(self.corrupt_data + self.corrupt_parity))


def verify(
    code: StripeCode,
    member: MemberView,
    transport: Transport,
    peers: Sequence[int],
    *,
    index: int | None = None,
    codec: Codec | None = None,
) -> VerifyResult:
    """Check all data and parity of a stripe; all members call this together.

    A piece whose sources are wrong says nothing about its parity; that parity is still
    compared with its own digests.  ValueError if members disagree about the snapshot.
    """
    member.require_fit(code)
    link = Link(transport, peers, index)
    introductions = introduce(link, member)
    shards = [record.shard_id for record in agreed_records(introductions)]
    with SparePieces(code) as spare:
        row = _RowVerifier(link, code, introductions, codec or open_row_codec(code), spare)
        gather_rows(link, code, member.data, row.check, row.code_piece, _nothing_to_pass, spare)
    computed = swap_digests(link, code, row.digests)
    known = swap_digests(link, code, row.known).astype(bool)
    parity_bad = _parity_differs(code, member, np.where(known, computed, member.parity_digests))
    found = msgspec.msgpack.encode((sorted(row.corrupt), parity_bad))
    reports = [
        msgspec.msgpack.decode(report, type=tuple[list[int], bool])
        for _, report in sorted(exchange(link, found).items())
    ]
    bad_data = {number for corrupt, _ in reports for number in corrupt}
    return VerifyResult(
        tuple(shards[number] for number in sorted(bad_data)),
        tuple(shard for shard, (_, bad) in zip(shards, reports, strict=True) if bad),
    )


class _RowVerifier:
    """Codes the row that was gathered here into scratch memory, and keeps its digests.

    ``known`` is 1 where the digests say what the parity must be, 0 where a source was
    wrong; ``corrupt`` are the members that wrong sources came from.
    """

    def __init__(
        self,
        link: Link,
        code: StripeCode,
        introductions: Mapping[int, Introduction],
        codec: Codec,
        spare: SparePieces,
    ) -> None:
        self._link, self._code = link, code
        self._kernel = encode_kernel(codec)
        (self._scratch,) = spare.sets(1, code.parity_members)
        self.digests = np.zeros((code.parity_members, code.chunk_blocks), np.uint64)
        self.known = np.ones_like(self.digests)
        self.corrupt: set[int] = set()
        self._checks = {n: self._data_check(n, i) for n, i in introductions.items()}

    def check(self, column: int, part: slice, piece: Bytes) -> None:
        """Note a wrong source instead of raising."""
        source = self._code.layout.holder(self._link.member, column)
        check = self._checks[source]
        if check is None or check.bad_blocks(column * self._code.chunk_bytes + part.start, piece):
            self.corrupt.add(source)
            self.known[:, self._code.blocks(part)] = 0

    def code_piece(self, _number: int, part: slice, columns: Sequence[Bytes]) -> None:
        """Compute the parities of a piece, and keep their digests."""
        outputs = [piece[: part.stop - part.start] for piece in self._scratch]
        self._kernel(columns, outputs)
        for parity, output in enumerate(outputs):
            digests = parity_digests_of(self._code, output)
            self.digests[parity, self._code.blocks(part)] = digests

    def _data_check(self, number: int, introduction: Introduction) -> Check | None:
        try:
            return introduction.data_check(self._code)
        except CorruptMemberError:
            self.corrupt.add(number)
            return None


def _parity_differs(code: StripeCode, member: MemberView, wanted: Digests) -> bool:
    stored = member.parity_digests
    return (
        parity_root(stored) != member.parity_root
        or not np.array_equal(stored, wanted)
        or not np.array_equal(parity_digests_of(code, member.parity), stored)
    )


def _nothing_to_pass(_number: int, _part: slice) -> Iterable[Exchange]:
    return ()
