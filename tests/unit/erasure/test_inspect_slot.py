"""Single damaged blocks are found without peers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatron_ft.erasure.encode import encode
from megatron_ft.erasure.inspect_slot import Damage, SlotInspector
from megatron_ft.erasure.member import MemberView, StripeCode
from tests.support.erasure_samples import (
    ThreadTransport,
    ThreadWorld,
    make_code,
    make_member,
    protected,
    writable,
)

LENGTHS = (9000, 12000, 10, 12000)
Harm = Callable[[StripeCode, MemberView], None]


def stripe(kind: str, k: int, m: int) -> tuple[StripeCode, list[MemberView]]:
    code = make_code(kind, k, m, LENGTHS[: k + m])
    members = [make_member(code, n, LENGTHS[n]) for n in range(k + m)]

    def work(rank: int, transport: ThreadTransport) -> MemberView:
        return protected(members[rank], encode(code, members[rank], transport, range(k + m)))

    results = ThreadWorld(k + m).run(work)
    return code, [writable(r) for r in results if isinstance(r, MemberView)]


def inspect(code: StripeCode, member: MemberView) -> Damage:
    inspector = SlotInspector(code, member, parity=True)
    half = inspector.blocks // 2
    return inspector.damage(0, half) | inspector.damage(half, inspector.blocks)


def flip(name: str, at: int) -> Harm:
    def harm(_: StripeCode, member: MemberView) -> None:
        getattr(member, name).view(np.uint8)[at] ^= 16

    return harm


def table_byte(code: StripeCode, member: MemberView) -> None:
    assert member.record is not None
    member.data[member.record.digest_offset + 3] ^= 1


def table_and_data(code: StripeCode, member: MemberView) -> None:
    table_byte(code, member)
    member.data[20] ^= 1


HARMS: dict[str, Harm] = {
    "data": flip("data", 20),
    "the first byte": flip("data", 0),
    "parity": flip("parity", 1500),
    "the last byte of parity": flip("parity", -1),
    "a digest of parity": flip("parity_digests", 9),
    "the digest table": table_byte,
    "table and data": table_and_data,
}


@pytest.mark.parametrize(("kind", "k", "m"), [("xor", 2, 1), ("rs", 2, 2), ("replica", 1, 1)])
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_found_where_it_is_and_nowhere_else(kind: str, k: int, m: int, harm: str) -> None:
    code, members = stripe(kind, k, m)
    for member in members:
        HARMS[harm](code, member)
        found = inspect(code, member)
        assert len(found) == 1, "a bad table hides what it vouches for"
        assert bool(found.parity) == ("parity" in harm)


def test_whole_members_have_no_damage_whatever_their_padding_is() -> None:
    code, whole = stripe("rs", 2, 2)
    for fill in (0, 255):
        for member in whole:
            assert member.record is not None
            member.data[member.record.used_bytes :] = fill
        assert all(inspect(code, member) == Damage() for member in whole)
