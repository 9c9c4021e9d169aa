"""An arena's slot as a stripe member's bytes, by what the arena's own header says."""

from __future__ import annotations

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import ArenaHeader, SlotHeader
from megatron_ft.erasure.member import MemberView, StripeCode


def code_of(header: ArenaHeader) -> StripeCode:
    """The stripe's numbers as the arena stores them."""
    return StripeCode(
        kind=header.codec,
        data_members=header.data_members,
        parity_members=header.parity_members,
        data_bytes=header.geometry.data_bytes,
        block_bytes=header.geometry.block_bytes,
        digest_algorithm=header.digest_algorithm,
    )


def member_of(arena: Arena, slot: int, header: SlotHeader, *, writable: bool = False) -> MemberView:
    """A slot's regions with the record and roots of ``header``, which proves them."""
    return MemberView(
        data=arena.data(slot, writable=writable),
        parity=arena.parity(slot, writable=writable),
        parity_digests=arena.parity_digests(slot, writable=writable),
        record=header.record,
        parity_root=header.parity_root,
        stripe_table=header.stripe_table,
    )
