"""Recompute a stripe's parity and compare; change nothing.

Each row is gathered and coded as in encoding, but only digests of the computed
parity travel to its holders, who compare them with what their memory holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import (
    Check,
    CorruptMemberError,
    parity_digests_of,
    parity_root,
)
from megatron_ft.erasure.codec import Codec
from megatron_ft.erasure.encode import swap_digests
from megatron_ft.erasure.gather import gather_rows
from megatron_ft.erasure.introduce import Introduction, agreed_records, introduce
from megatron_ft.erasure.member import Digests, MemberView, StripeCode
from megatron_ft.erasure.pieces import SparePieces
from megatron_ft.erasure.row_encoder import encode_kernel, open_row_codec
from megatron_ft.erasure.transport import Exchange, Link, Transport, exchange


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
