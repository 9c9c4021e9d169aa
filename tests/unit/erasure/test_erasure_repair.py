"""Single damaged blocks: found without peers, recomputed from them, proved, written back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from megatron_ft.erasure.block_repair import (
    Damage,
    RecomputedBlocks,
    SlotInspector,
    block_of,
    mend_data,
    mend_parity,
    recompute,
    table_blocks,
)
from megatron_ft.erasure.encode import encode
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


def recomputed(
    code: StripeCode, members: list[MemberView], target: int, damage: Damage
) -> RecomputedBlocks:
    def work(rank: int, transport: ThreadTransport) -> RecomputedBlocks:
        peers = range(code.members)
        return recompute(code, members[rank], transport, peers, target, damage)

    results = ThreadWorld(code.members).run(work)
    for number, result in enumerate(results):
        assert isinstance(result, RecomputedBlocks), result
        assert number == target or result == RecomputedBlocks()
    found = results[target]
    assert isinstance(found, RecomputedBlocks)
    return found


def repair(code: StripeCode, members: list[MemberView], target: int) -> int:
    """One round as the scrub and the SMP do it; blocks that were written."""
    damage = inspect(code, members[target])
    found = recomputed(code, members, target, damage)
    assert found.left + len(found.data) + len(found.parity) == len(damage)
    written = len(found.data) if mend_data(code, members[target], found.data) else 0
    return written + (len(found.parity) if mend_parity(code, members[target], found.parity) else 0)


def copies(members: list[MemberView]) -> list[MemberView]:
    return [writable(member) for member in members]


def same(one: MemberView, other: MemberView) -> bool:
    names = ("data", "parity", "parity_digests")
    return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in names)


def flip(name: str, at: int) -> Harm:
    def harm(_: StripeCode, member: MemberView) -> None:
        getattr(member, name).view(np.uint8)[at] ^= 16

    return harm


def table_byte(code: StripeCode, member: MemberView) -> None:
    assert member.record is not None
    member.data[member.record.digest_offset + 3] ^= 1


def table_and_data(code: StripeCode, member: MemberView) -> None:
    table_byte(code, member)
    member.data[2000] ^= 1


HARMS: dict[str, Harm] = {
    "data": flip("data", 2000),
    "the first byte": flip("data", 0),
    "padding": flip("data", -1),
    "parity": flip("parity", 1500),
    "the last byte of parity": flip("parity", -1),
    "a digest of parity": flip("parity_digests", 9),
    "the digest table": table_byte,
    "table and data": table_and_data,
}


@pytest.mark.parametrize(("kind", "k", "m"), [("xor", 2, 1), ("rs", 2, 2), ("replica", 1, 1)])
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_found_and_repaired_from_the_other_members(
    kind: str, k: int, m: int, harm: str
) -> None:
    code, whole = stripe(kind, k, m)
    for target in range(k + m):
        members = copies(whole)
        HARMS[harm](code, members[target])
        rounds = 0
        while rounds < 3 and inspect(code, members[target]):
            assert repair(code, members, target) > 0
            rounds += 1
        assert rounds == 1 + (harm == "table and data"), "a bad table hides what it vouches for"
        assert all(same(a, b) for a, b in zip(members, whole, strict=True))


def test_whole_members_have_no_damage() -> None:
    code, whole = stripe("rs", 2, 2)
    assert all(inspect(code, member) == Damage() for member in whole)


def test_two_members_damaged_in_one_row_need_two_parities() -> None:
    """Each damaged source counts as one more erasure; beyond m nothing is written."""
    for k, m in ((2, 2), (3, 1)):
        code, whole = stripe("rs", k, m)
        members = copies(whole)
        for member in members[:2]:
            for region in (member.data, member.parity):
                region[:: code.block_bytes] ^= 1
        written = repair(code, members, 0)
        assert (written > 0) == (m == 2)
        assert same(members[0], whole[0]) == (m == 2)


def test_a_source_of_another_snapshot_is_not_used() -> None:
    code, members = stripe("xor", 2, 1)
    record = members[1].record
    assert record is not None
    table = (dataclasses.replace(members[0]).stripe_table[0], record, record)
    members[0] = dataclasses.replace(members[0], stripe_table=table)
    members[0].data[0] ^= 1
    assert recomputed(code, members, 0, inspect(code, members[0])).left == 1


def test_bytes_that_prove_nothing_are_not_written() -> None:
    code, whole = stripe("rs", 2, 2)
    member = writable(whole[0])
    member.data[0] ^= 1
    member.parity[0] ^= 1
    damaged = writable(member)
    wrong = np.zeros(code.block_bytes, np.uint8)
    assert not mend_data(code, member, {0: wrong})
    assert not mend_parity(code, member, {0: wrong})
    right = block_of(code, whole[0].data, 0)
    # A block outside the region, or not a whole one, whoever sent it.
    assert not mend_data(code, member, {0: right, 1 << 40: right})
    assert not mend_data(code, member, {0: right[:-1]})
    assert not mend_parity(code, member, {-1: right})
    assert same(member, damaged)
    assert mend_data(code, member, {0: right})


def test_blocks_that_would_be_right_elsewhere_or_in_part_are_not_written() -> None:
    """Digests and roots agree with these: only their numbers and lengths are wrong."""
    code, members = stripe("rs", 2, 2)
    member = members[2]
    before, last = writable(member), code.data_bytes // code.block_bytes - 1
    zeros = block_of(code, member.data, last)
    assert not zeros.any(), "there is no padding"
    assert not mend_data(code, member, {last: zeros[:-1]})
    assert not mend_data(code, member, {last + 1: zeros})
    assert not mend_parity(
        code, member, {-1: block_of(code, member.parity, code.parity_blocks - 1)}
    )
    assert same(member, before)


def test_a_damaged_table_is_only_written_whole() -> None:
    code, whole = stripe("xor", 2, 1)
    member = writable(whole[0])
    table_byte(code, member)
    first, *_ = table_blocks(code, member)
    assert not mend_data(code, member, {0: block_of(code, whole[0].data, 0)})
    assert mend_data(code, member, {first: block_of(code, whole[0].data, first)})
    assert same(member, whole[0])
