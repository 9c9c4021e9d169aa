"""Parity of a stripe: gather each row at one member, code it, pass on.

A member of N sends L (N-1)/(N-m) bytes for L bytes of data, the least that is possible; sending
every chunk to all m parity holders would cost m L.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from megatron_ft.core.background import Pace
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.handshake import agreed_records, introduce
from megatron_ft.erasure.member import (
    CorruptMemberError,
    DataCheck,
    Digests,
    MemberView,
    StripeCode,
    chunk_of,
    parity_digests_of,
    parity_root,
)
from megatron_ft.erasure.rows import SparePieces, gather_rows
from megatron_ft.erasure.sums import SumCheck
from megatron_ft.erasure.transport import (
    Exchange,
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
    Transport,
    barrier,
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
    pace: Pace | None = None,
) -> EncodeResult:
    """Fill ``member.parity`` and ``member.parity_digests``; all members call this together.

    ``peers`` are the members' ranks in stripe order, ``index`` says which member we are
    (needed only if one process stands for two); ``pace`` caps what is sent.  Source
    blocks are checked, by their sum where that takes less, and received parity is read back:
    CorruptMemberError names the shard whose bytes are wrong, and the parity is not to be used.
    ValueError if members disagree about the snapshot or a length.  It returns on any member only
    once the parity of all of them is in place.
    """
    member.require_fit(code)
    link = Link(transport, peers, index, pace)
    introductions = introduce(link, member)
    records = agreed_records(introductions)
    checks = [introductions[number].data_check(code) for number in range(code.members)]
    into = chunk_of(code, member.parity, 0) if code.copies_only else None
    with SparePieces(code) as spare:
        row = RowEncoder(link, code, member, checks, spare)
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
        spare: SparePieces,
    ) -> None:
        self._link, self._code, self._parity = link, code, member.parity
        self._checks, self._kernel = checks, code.codec().encode_kernel()
        self._copies, self._sums = code.copies_only, SumCheck.of(code, spare)
        self._spare = spare.sets(2, 0 if self._copies else code.parity_members - 1)
        self.digests = np.zeros((code.parity_members, code.chunk_blocks), np.uint64)
        self.arrived = np.zeros_like(self.digests)

    def check(self, column: int, part: slice, piece: Bytes) -> None:
        """Pad a source; CorruptMemberError if it is wrong, unless the row's sum will say so.

        What is parity as well is digested once.
        """
        source = self._code.layout.holder(self._link.member, column)
        offset = column * self._code.chunk_bytes + part.start
        check = self._checks[source]
        check.coded(offset, piece, piece)
        if self._copies:
            self.digests[:, self._code.blocks(part)] = check.required_digests(offset, piece)
        elif self._sums is None:
            check.require(offset, piece)

    def code_piece(self, number: int, part: slice, columns: Sequence[Bytes]) -> None:
        """Compute all m parities of a piece, and their digests while they are in cache."""
        if not self._copies:
            self._compute(number, part, columns)
        if number == len(range(0, self._code.chunk_bytes, self._code.piece_bytes)) // 2:
            reach("encode.half")

    def _compute(self, number: int, part: slice, columns: Sequence[Bytes]) -> None:
        outputs, first = [self._home(0, part), *self._others(number, part)], None
        if self._sums is None:
            self._kernel(columns, outputs)
        else:
            first = self._sums.compute(*self._symbols, columns, outputs, self._sources(part))
        for parity, output in enumerate(outputs):
            digests = first if first is not None else parity_digests_of(self._code, output)
            self.digests[parity, self._code.blocks(part)] = digests
            first = None

    @cached_property
    def _symbols(self) -> tuple[range, range]:
        data = self._code.data_members
        return range(data, self._code.members), range(data)

    def _sources(self, part: slice) -> list[tuple[DataCheck, int]]:
        holder, chunk = self._code.layout.holder, self._code.chunk_bytes
        return [
            (self._checks[holder(self._link.member, column)], column * chunk + part.start)
            for column in range(self._code.data_members)
        ]

    def passes(self, number: int, part: slice) -> Iterable[Exchange]:
        """Send parity j of our row to member + j, receive that of row member - j."""
        for j, output in enumerate(self._others(number, part), 1):
            yield Exchange(partial(self._pass, j, part, output), partial(self._note, j, part))

    def _pass(self, j: int, part: slice, output: Bytes) -> Sequence[Pending]:
        link, home = self._link, self._home(j, part)
        return [
            link.receive(home, link.member - j, MessageKind.RESULT),
            link.send(output, link.member + j, MessageKind.RESULT),
        ]

    def _note(self, j: int, part: slice) -> None:
        """Digests of parity as it has arrived here: soon, so that it need not be loaded again."""
        digests = parity_digests_of(self._code, self._home(j, part))
        self.arrived[j, self._code.blocks(part)] = digests

    def _home(self, j: int, part: slice) -> Bytes:
        return chunk_of(self._code, self._parity, j)[part]

    def _others(self, number: int, part: slice) -> list[Bytes]:
        """Buffers of parities 1, 2, ... of our row."""
        if self._copies:
            return [self._home(0, part)] * (self._code.parity_members - 1)
        return [piece[: part.stop - part.start] for piece in self._spare[number % 2]]
