"""A fire drill on one stripe: act as if a member were lost, and compare with what is there.

All members' bytes are at hand here (arenas of this machine); nothing is written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import Check, DataCheck, ParityCheck, digest_table_of
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.repair import RowSolver, piece_of

Checks = tuple[DataCheck, ParityCheck]


@dataclass(frozen=True)
class DrillResult:
    """``differing`` pieces, as (row, offset in the chunk), of the rebuilt ``bytes`` bytes.

    ``sources`` are the members that each row was solved from, as member numbers.
    """

    bytes: int
    sources: tuple[tuple[int, ...], ...]
    differing: tuple[tuple[int, int], ...]


def drill(
    code: StripeCode,
    members: Mapping[int, MemberView],
    target: int,
    dice: random.Random,
    *,
    pace: Callable[[int], None] = lambda length: None,
) -> DrillResult:
    """Rebuild a member's data and parity from k others of each row, drawn by ``dice``.

    ``members`` may lack some besides the target, as long as k others are there, else
    ValueError.  ``pace`` is told the bytes of each piece.  CorruptMemberError names a
    source whose bytes fail their digests.
    """
    others = sorted(members.keys() - {target})
    if len(others) < code.data_members:
        raise ValueError(
            f"a row needs {code.data_members} members besides the lost one; {len(others)} are here"
        )
    checks = {number: _checks(code, members[number]) for number in others}
    solver, total = RowSolver(code), 0
    chosen, differing = [], []
    for row in range(code.members):
        sources = tuple(sorted(dice.sample(others, code.data_members)))
        chosen.append(sources)
        for part in code.pieces():
            pieces = {n: piece_of(code, members[n], n, row, part) for n in sources}
            for number, piece in pieces.items():
                _require(code, checks[number], number, row, part, piece)
            (rebuilt,) = solver.solve(row, pieces, [target])
            live = piece_of(code, members[target], target, row, part)
            if not np.array_equal(rebuilt, live):
                differing.append((row, part.start))
            total += rebuilt.nbytes
            pace(rebuilt.nbytes)
    return DrillResult(total, tuple(chosen), tuple(differing))


def _checks(code: StripeCode, member: MemberView) -> Checks:
    assert member.record is not None
    data = DataCheck(code, member.record, digest_table_of(member))
    parity = ParityCheck(code, member.record.shard_id, member.parity_digests, member.parity_root)
    return data, parity


def _require(
    code: StripeCode, checks: Checks, member: int, row: int, part: slice, piece: Bytes
) -> None:
    symbol = code.layout.symbol(row, member)
    check: Check = checks[code.layout.is_parity(symbol)]
    check.require(code.layout.chunk(symbol) * code.chunk_bytes + part.start, piece)
