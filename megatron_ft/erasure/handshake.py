"""Handshake of a stripe's members: records and digests, before any shard's byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from megatron_ft.core.errors import CorruptBlockError
from megatron_ft.core.identity import SealedRecord
from megatron_ft.erasure.member import (
    CorruptMemberError,
    DataCheck,
    MemberView,
    ParityCheck,
    StripeCode,
    digest_table_of,
)
from megatron_ft.erasure.transport import Link, exchange


class Introduction(msgspec.Struct, frozen=True):
    """One member's record and digests, and what it stored about the whole stripe."""

    record: SealedRecord
    digest_table: bytes
    parity_digests: bytes
    parity_root: bytes
    stripe_table: tuple[SealedRecord, ...]

    def data_check(self, code: StripeCode) -> DataCheck:
        """Check of the member's data; CorruptMemberError if its table fails its root."""
        return DataCheck(code, self.record, np.frombuffer(self.digest_table, np.uint8))

    def parity_check(self, code: StripeCode) -> ParityCheck:
        """Check of the member's parity; CorruptMemberError if its digests fail their root."""
        digests = np.frombuffer(self.parity_digests, "<u8")
        return ParityCheck(code, self.record.shard_id, digests, self.parity_root)


def introduce(
    link: Link, member: MemberView, lost: frozenset[int] = frozenset()
) -> Mapping[int, Introduction]:
    """Everyone's introduction, by member; lost members only listen.

    ValueError if this member is not lost and has no record.
    """
    blob = b""
    if link.member not in lost:
        if member.record is None:
            raise ValueError(f"member {link.member} has no sealed record; seal its slot first")
        mine = Introduction(
            record=member.record,
            digest_table=digest_table_of(member).tobytes(),
            parity_digests=member.parity_digests.astype("<u8").tobytes(),
            parity_root=member.parity_root,
            stripe_table=member.stripe_table,
        )
        blob = msgspec.msgpack.encode(mine)
    received = exchange(link, blob, lost)
    decoder = msgspec.msgpack.Decoder(Introduction)
    return {index: decoder.decode(frame) for index, frame in received.items()}


def agreed_records(introductions: Mapping[int, Introduction]) -> tuple[SealedRecord, ...]:
    """The stripe's table made from its members' own records, in stripe order.

    ValueError if they are not of one snapshot, or one shard comes twice.
    """
    records = tuple(introductions[index].record for index in sorted(introductions))
    if len({(r.snapshot, r.iteration) for r in records}) != 1:
        listed = ", ".join(f"{r.shard_id} has {r.snapshot} of {r.iteration}" for r in records)
        raise ValueError(f"the members of a stripe hold different snapshots: {listed}")
    if len({r.shard_id for r in records}) != len(records):
        raise ValueError(f"a shard is twice in a stripe: {[r.shard_id for r in records]}")
    return records


def agreed_table(
    introductions: Mapping[int, Introduction], members: int
) -> tuple[SealedRecord, ...]:
    """The stripe's table as all survivors stored it when the stripe was protected.

    CorruptBlockError if they do not agree; CorruptMemberError if a survivor's own
    record is not the one that was protected.
    """
    tables = {introduction.stripe_table for introduction in introductions.values()}
    if len(tables) != 1:
        raise CorruptBlockError(
            f"the survivors of a stripe stored different tables: {_who(introductions)}; they hold "
            "parity of different snapshots, so this one cannot be rebuilt"
        )
    table = tables.pop()
    if len(table) != members:
        raise CorruptBlockError(f"the stripe's table has {len(table)} of {members} members")
    for index, introduction in introductions.items():
        if introduction.record != table[index]:
            raise CorruptMemberError(
                introduction.record.shard_id, "its record differs from the stripe's table"
            )
    return table


def _who(introductions: Mapping[int, Introduction]) -> Sequence[str]:
    return [introduction.record.shard_id for introduction in introductions.values()]
