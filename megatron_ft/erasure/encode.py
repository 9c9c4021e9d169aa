"""Parity of a stripe: gather each row at one member, code it, pass on.

A member of N sends L (N-1)/(N-m) bytes for L bytes of data, the least that is possible; sending
every chunk to all m parity holders would cost m L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_ft.core.background import Pace
from megatron_ft.core.identity import SealedRecord
from megatron_ft.erasure.handshake import agreed_records, introduce
from megatron_ft.erasure.member import (
    CorruptMemberError,
    Digests,
    MemberView,
    StripeCode,
    chunk_of,
    parity_root,
)
from megatron_ft.erasure.rows import (
    RowEncoder,
    SparePieces,
    gather_rows,
)
from megatron_ft.erasure.transport import (
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
