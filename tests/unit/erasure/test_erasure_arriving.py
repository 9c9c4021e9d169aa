"""A rebuilt member is checked while it arrives: every wrong byte is found, in whatever region."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_ft.erasure.member import CorruptMemberError, MemberView, StripeCode, parity_digests_of
from megatron_ft.erasure.rebuild import RebuildCheck
from tests.support.erasure_samples import make_code, make_lost, make_member

LENGTH = 5000
CODE = make_code("rs", 2, 1, [LENGTH, 2 * LENGTH, LENGTH], 512)
"""Member 0 is shorter than another, so padding follows its digest table."""


def arrived(code: StripeCode, view: MemberView) -> RebuildCheck:
    """Every piece of every row has arrived, as it lies there now."""
    arriving = RebuildCheck(code, view)
    for row in range(code.members):
        for part in code.pieces(code.block_bytes * 2):
            arriving.arrived(code.layout.symbol(row, 0), part)
    return arriving


def rebuilt(source: MemberView) -> MemberView:
    """A member that has received all bytes of ``source``, its parity's digests included."""
    view = dataclasses.replace(make_lost(CODE), record=None)
    view.data[:] = source.data
    view.parity_digests[:] = parity_digests_of(CODE, view.parity)
    return view


def test_right_bytes_pass() -> None:
    source = make_member(CODE, 0, LENGTH)
    assert source.record is not None
    arrived(CODE, rebuilt(source)).require(source.record)


def test_every_wrong_byte_is_found() -> None:
    source = make_member(CODE, 0, LENGTH)
    assert source.record is not None
    view = rebuilt(source)
    used = source.record.used_bytes
    for place in {*range(0, used, 97), source.record.digest_offset, used - 1}:
        view.data[place] ^= 4
        with pytest.raises(CorruptMemberError, match="shard s0.* rebuilt data"):
            arrived(CODE, view).require(source.record)
        view.data[place] ^= 4
    assert used < CODE.data_bytes, "there is no padding behind the table"
    view.data[used:] ^= 4
    arrived(CODE, view).require(source.record)
    for block in range(CODE.parity_blocks):
        view.parity[block * CODE.block_bytes + 3] ^= 4
        with pytest.raises(CorruptMemberError, match=f"shard s0, block {block}: its rebuilt par"):
            arrived(CODE, view).require(source.record)
        view.parity[block * CODE.block_bytes + 3] ^= 4


def test_another_members_sound_bytes_are_not_taken() -> None:
    """Table and bytes belong together, but not to the record in the stripe's table."""
    source, other = make_member(CODE, 0, LENGTH), make_member(CODE, 1, LENGTH)
    assert source.record is not None
    assert not np.array_equal(source.data, other.data)
    with pytest.raises(CorruptMemberError, match="shard s0, block 0"):
        arrived(CODE, rebuilt(other)).require(source.record)
