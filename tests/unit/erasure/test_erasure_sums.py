"""Sources of a row that are checked by their sum: any wrong one is named, and so is this node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core import isal
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import CorruptMemberError, DataCheck, digest_table_of
from megatron_ft.erasure.rows import SparePieces
from megatron_ft.erasure.sums import SumCheck
from tests.support.erasure_samples import make_code, make_member

SHAPES = [("xor", 2, 1), ("xor", 3, 1), ("rs", 3, 1), ("rs", 4, 2), ("rs", 5, 3)]


def first_pieces(shape: tuple[str, int, int], size: int) -> tuple[SumCheck, list[Bytes], list[Any]]:
    """The row of the first k members' first chunks, with their checks."""
    kind, k, m = shape
    code = make_code(kind, k, m, [size] * (k + m), 512)
    members = [make_member(code, n, size) for n in range(k)]
    checks = [
        DataCheck(code, member.record, digest_table_of(member).copy())
        for member in members
        if member.record is not None
    ]
    pieces = [np.array(member.data[: code.chunk_bytes]) for member in members]
    for check, piece in zip(checks, pieces, strict=True):
        check.coded(0, piece, piece)
    sums = SumCheck.of(code, SparePieces(code, code.chunk_bytes))
    assert sums is not None
    return sums, pieces, [(check, 0) for check in checks]


def compute(
    shape: tuple[str, int, int], sums: SumCheck, pieces: list[Bytes], checks: list[Any]
) -> list[Bytes]:
    _, k, m = shape
    outputs = [np.zeros_like(pieces[0]) for _ in range(m)]
    sums.compute(range(k, k + m), range(k), pieces, outputs, checks)
    return outputs


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 20_000), st.data())
def test_one_wrong_bit_of_any_source_is_named_with_its_block(
    shape: tuple[str, int, int], size: int, data: st.DataObject
) -> None:
    sums, pieces, checks = first_pieces(shape, size)
    right = compute(shape, sums, pieces, checks)
    victim = data.draw(st.integers(0, shape[1] - 1))
    record = checks[victim][0]._record
    last = min(record.used_bytes, pieces[victim].nbytes) - 1
    at = data.draw(st.integers(0, last))
    pieces[victim][at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptMemberError) as caught:
        compute(shape, sums, pieces, checks)
    assert (caught.value.shard_id, caught.value.block) == (record.shard_id, at // 512)
    pieces[victim][:] = first_pieces(shape, size)[1][victim]
    assert all(map(np.array_equal, right, compute(shape, sums, pieces, checks)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_symbols_are_those_of_the_codec_alone(shape: tuple[str, int, int]) -> None:
    sums, pieces, checks = first_pieces(shape, 5000)
    found = compute(shape, sums, pieces, checks)
    alone = [np.zeros_like(piece) for piece in found]
    sums._codec.encode_kernel()(pieces, alone)
    assert all(map(np.array_equal, found, alone))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_node_that_adds_up_wrongly_blames_no_shard(
    shape: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, pieces, checks = first_pieces(shape, 5000)
    encode = isal.IsaL.encode

    def wrong(
        library: isal.IsaL, tables: Bytes, sources: list[Bytes], outputs: list[Bytes]
    ) -> None:
        encode(library, tables, sources, outputs)
        outputs[-1][700] ^= 4

    monkeypatch.setattr(isal.IsaL, "encode", wrong)
    with pytest.raises(RuntimeError, match="take it out of service"):
        compute(shape, sums, pieces, checks)


@pytest.mark.parametrize("shape", [("rs", 2, 2), ("xor", 1, 1), ("replica", 1, 2)])
def test_where_a_sum_takes_longer_sources_are_checked_each(shape: tuple[str, int, int]) -> None:
    code = make_code(*shape, [100] * (shape[1] + shape[2]), 512)
    assert SumCheck.of(code, SparePieces(code, code.chunk_bytes)) is None
