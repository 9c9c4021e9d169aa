"""A piece is right by one CRC exactly where all of its blocks are right by theirs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena.digest import digest_table
from megatron_ft.core import isal
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure import checks
from megatron_ft.erasure import checks as run_check
from megatron_ft.erasure.member import CorruptMemberError, DataCheck, RunCheck, digest_table_of
from tests.support.erasure_samples import make_code, make_member

BLOCK = 64
CODE = make_code("rs", 2, 2, [BLOCK * 90] * 4, BLOCK)
MEMBER = make_member(CODE, 0, BLOCK * 90)
assert MEMBER.record is not None
WHOLE = MEMBER.record.digest_offset // BLOCK
TABLE = digest_table(MEMBER.data, MEMBER.record)[:WHOLE]

pytestmark = pytest.mark.skipif(not isal.available(), reason="ISA-L is missing")


@given(st.integers(1, 17), st.data())
def test_a_run_is_right_where_its_bytes_are(run: int, data: st.DataObject) -> None:
    chunk = data.draw(st.integers(0, 1))
    first = data.draw(st.integers(0, CODE.chunk_blocks - 1))
    offset = chunk * CODE.chunk_bytes + first * BLOCK
    end = min(offset + run * BLOCK, (chunk + 1) * CODE.chunk_bytes)
    piece, check = MEMBER.data[offset:end].copy(), RunCheck(CODE, TABLE)
    blocks = piece.nbytes // BLOCK
    known = blocks in (2, 4, 8, 16) and first % blocks == 0 and end <= WHOLE * BLOCK
    assert check.is_right(offset, piece) == known
    bit = data.draw(st.integers(0, 8 * piece.nbytes - 1))
    piece[bit // 8] ^= 1 << bit % 8
    assert not check.is_right(offset, piece)


def test_a_run_is_known_wherever_all_of_it_is() -> None:
    """At every place, those included where the data end within a chunk."""
    check, chunk_end = RunCheck(CODE, TABLE), CODE.chunk_bytes
    assert chunk_end < WHOLE * BLOCK < 2 * chunk_end
    for chunk, first, run in product((0, 1), range(CODE.chunk_blocks), range(1, 18)):
        offset, length = chunk * chunk_end + first * BLOCK, run * BLOCK
        if first * BLOCK + length > chunk_end:
            continue
        known = run in (2, 4, 8, 16) and first % run == 0 and offset + length <= WHOLE * BLOCK
        assert check.is_right(offset, MEMBER.data[offset : offset + length]) == known


def test_the_bytes_of_another_place_prove_nothing() -> None:
    """Between two runs nothing is known, even of what would be right in one of them."""
    check = RunCheck(CODE, TABLE)
    piece = MEMBER.data[4 * BLOCK : 8 * BLOCK]
    assert [at for at in range(12) if check.is_right(at * BLOCK, piece)] == [4]


def test_a_right_piece_takes_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = list[int](), run_check.digest_block

    def counted(piece: Bytes, algorithm: int) -> int:
        calls.append(piece.nbytes)
        return plain(piece, algorithm)

    monkeypatch.setattr(run_check, "digest_block", counted)
    check = RunCheck(CODE, TABLE)
    assert all(check.is_right(at, MEMBER.data[at : at + 512]) for at in (0, 512, 1024))
    assert calls == [512] * 3


def test_copies_are_digested_by_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of a piece's blocks are then those that it was checked against."""
    assert MEMBER.record is not None
    check = DataCheck(CODE, MEMBER.record, digest_table_of(MEMBER))
    piece = MEMBER.data[512:1024]
    with monkeypatch.context() as patch:
        patch.setattr(checks, "digest_blocks", None)
        assert check.required_digests(512, piece).tolist() == TABLE[8:16].tolist()
    wrong = piece.copy()
    wrong[100] ^= 1
    with pytest.raises(CorruptMemberError, match="block 9:"):
        check.required_digests(512, wrong)
