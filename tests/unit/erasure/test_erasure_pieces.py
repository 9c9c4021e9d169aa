"""Buffers for pieces: whose they are, and when they serve again."""

from __future__ import annotations

import pytest

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.encode import encode
from megatron_ft.erasure.rows import SparePieces, held_bytes
from tests.support.erasure_samples import make_code, make_member
from tests.support.stripe_runs import succeed

CODE = make_code("rs", 2, 2, [1 << 20] * 4, 65536)


def addresses(sets: list[list[Bytes]]) -> list[int]:
    return [buffer.ctypes.data for buffers in sets for buffer in buffers]


def test_buffers_serve_the_next_operation() -> None:
    with SparePieces(CODE) as spare:
        first = addresses(spare.sets(2, 3))
    held = held_bytes()
    with SparePieces(CODE) as spare:
        assert addresses(spare.sets(2, 3)) == first
    assert held_bytes() == held


def test_operations_at_one_time_share_nothing() -> None:
    with SparePieces(CODE) as one, SparePieces(CODE) as other:
        sets = [*one.sets(1, 2), *one.sets(2, 1), *other.sets(1, 2)]
        buffers = [buffer for buffers in sets for buffer in buffers]
        for number, buffer in enumerate(buffers):
            buffer[:] = number
        assert [set(buffer.tolist()) for buffer in buffers] == [{n} for n in range(6)]


def test_buffers_of_a_failed_operation_are_left_to_its_transfers() -> None:
    with pytest.raises(RuntimeError), SparePieces(CODE) as spare:
        left = spare.sets(1, 3)
        raise RuntimeError("a member is gone")
    with SparePieces(CODE) as spare:
        assert not set(addresses(left)) & set(addresses(spare.sets(1, 3)))


def test_no_buffer_is_longer_than_a_chunk() -> None:
    with SparePieces(CODE, 4096) as short, SparePieces(CODE, 1 << 30) as long:
        assert short.sets(1, 1)[0][0].nbytes == 4096
        assert long.sets(1, 1)[0][0].nbytes == CODE.chunk_bytes
        assert long.sets(2, 0) == [[], []]


def test_encoding_again_takes_no_new_memory() -> None:
    members = [make_member(CODE, n, 1 << 20) for n in range(4)]
    held = []
    for _ in range(3):
        succeed(4, lambda n, t: encode(CODE, members[n], t, range(4)))
        held.append(held_bytes())
    assert len(set(held)) == 1
