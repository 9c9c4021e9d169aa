"""Solve one piece of one row of a stripe: lost symbols from any k others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import Check
from megatron_ft.erasure.codec import Codec, Kernel
from megatron_ft.erasure.inspection import Damage
from megatron_ft.erasure.member import MemberView, StripeCode, chunk_of
from megatron_ft.erasure.row_encoder import open_row_codec


@dataclass(frozen=True)
class Place:
    """Where a block lies in its stripe: its row, its symbol there, its offset in the chunk."""

    row: int
    symbol: int
    offset: int


def place_of(code: StripeCode, member: int, block: int, *, parity: bool) -> Place:
    """The place of a block of a member's data or parity."""
    chunk, within = divmod(block, code.chunk_blocks)
    layout = code.layout
    if parity:
        return Place(
            layout.parity_row(member, chunk), code.data_members + chunk, within * code.block_bytes
        )
    return Place(layout.data_row(member, chunk), chunk, within * code.block_bytes)


def places_of(code: StripeCode, member: int, damage: Damage) -> list[tuple[bool, int, Place]]:
    """All damaged blocks of a member as (in parity, number, place), data first."""
    regions = ((False, damage.data), (True, damage.parity))
    return [
        (parity, block, place_of(code, member, block, parity=parity))
        for parity, blocks in regions
        for block in blocks
    ]


def piece_of(code: StripeCode, view: MemberView, member: int, row: int, part: slice) -> Bytes:
    """What a member keeps of a row, cut to ``part`` of the chunk."""
    symbol = code.layout.symbol(row, member)
    region = view.parity if code.layout.is_parity(symbol) else view.data
    return chunk_of(code, region, code.layout.chunk(symbol))[part]


Checks = tuple[Check | None, Check | None]
"""Checks of a member's data and of its parity; None where its digests prove nothing."""


class RowSolver:
    """Solves rows of one stripe; keeps the kernels that it has used."""

    def __init__(self, code: StripeCode, codec: Codec | None = None) -> None:
        """ISA-L's codec for the scheme if it can be loaded; see open_codec."""
        self._code, self._codec = code, codec or open_row_codec(code)
        self._kernels: dict[tuple[tuple[int, ...], tuple[int, ...]], Kernel] = {}

    def solve(self, row: int, pieces: Mapping[int, Bytes], wanted: Sequence[int]) -> list[Bytes]:
        """The pieces of the ``wanted`` members, in new buffers, from those of k other members."""
        layout = self._code.layout
        given = tuple(layout.symbol(row, member) for member in pieces)
        missing = tuple(layout.symbol(row, member) for member in wanted)
        key = missing, given
        if key not in self._kernels:
            self._kernels[key] = self._codec.kernel(missing, given)
        sources = list(pieces.values())
        outputs = [np.empty_like(sources[0]) for _ in wanted]
        self._kernels[key](sources, outputs)
        return outputs

    def solve_block(
        self, place: Place, target: int, pieces: Mapping[int, Bytes], checks: Mapping[int, Checks]
    ) -> Bytes | None:
        """A damaged block of ``target`` from other members' blocks of its row.

        Only pieces that match their owners' digests are used; None if fewer than k do.
        """
        right = [n for n in pieces if self._is_right(n, place, pieces[n], checks.get(n))]
        chosen = {n: pieces[n] for n in right[: self._code.data_members]}
        if len(chosen) < self._code.data_members:
            return None
        return self.solve(place.row, chosen, [target])[0]

    def _is_right(self, member: int, place: Place, piece: Bytes, checks: Checks | None) -> bool:
        layout = self._code.layout
        symbol = layout.symbol(place.row, member)
        check = None if checks is None else checks[layout.is_parity(symbol)]
        offset = layout.chunk(symbol) * self._code.chunk_bytes + place.offset
        return check is not None and not check.bad_blocks(offset, piece)
