"""Recompute single blocks of one member from the others, while its slot stays what it is.

Each other member sends what it keeps of the block's row; the damaged member checks every
piece against its owner's digests and solves from k that are right.  Nothing is written
here: the caller gives the blocks to the slot's owner, who proves them once more.

Solve one piece of one row of a stripe: lost symbols from any k others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import Check, CorruptMemberError
from megatron_ft.erasure.codec import Codec, Kernel
from megatron_ft.erasure.introduce import Introduction, agreed_records, introduce
from megatron_ft.erasure.member import MemberView, StripeCode, chunk_of
from megatron_ft.erasure.mending import Damage
from megatron_ft.erasure.rows import open_row_codec
from megatron_ft.erasure.transport import Kind, Link, Transport, Window, barrier


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


@dataclass
class RecomputedBlocks:
    """Blocks of the damaged member by number, and how many could not be recomputed."""

    data: dict[int, Bytes] = field(default_factory=dict)
    parity: dict[int, Bytes] = field(default_factory=dict)
    left: int = 0


def recompute(
    code: StripeCode,
    member: MemberView,
    transport: Transport,
    peers: Sequence[int],
    target: int,
    damage: Damage,
    *,
    index: int | None = None,
    codec: Codec | None = None,
) -> RecomputedBlocks:
    """The damaged blocks of member ``target``, on that member; empty on the others.

    All members call this together, with the same damage.  Only sources whose digests
    match are used; a block with fewer than k of them is counted as left.  ValueError if
    members disagree about the snapshot or a length.
    """
    member.require_fit(code)
    link = Link(transport, peers, index)
    introductions = introduce(link, member)
    agreed_records(introductions)
    places = places_of(code, target, damage)
    result = RecomputedBlocks()
    if link.member == target:
        _Solver(link, code, introductions, member, codec).run(places, result)
    else:
        _give(link, code, member, target, places)
    barrier(link)
    return result


def _give(
    link: Link,
    code: StripeCode,
    member: MemberView,
    target: int,
    places: Sequence[tuple[bool, int, Place]],
) -> None:
    window = Window(link)
    for _, _, place in places:
        piece = piece_of(code, member, link.member, place.row, _part(code, place))
        window.post(partial(_send, link, piece, target))
    window.drain()


def _send(link: Link, piece: Bytes, target: int) -> list[object]:
    return [link.send(piece, target, Kind.SOURCE)]


def _receive(link: Link, buffer: Bytes, source: int) -> list[object]:
    return [link.receive(buffer, source, Kind.SOURCE)]


def _part(code: StripeCode, place: Place) -> slice:
    return slice(place.offset, place.offset + code.block_bytes)


class _Solver:
    """The damaged member: receives a row's block from every other one, and solves."""

    def __init__(
        self,
        link: Link,
        code: StripeCode,
        introductions: Mapping[int, Introduction],
        member: MemberView,
        codec: Codec | None,
    ) -> None:
        self._link = link
        self._solver = RowSolver(code, codec)
        self._others = [n for n in range(code.members) if n != link.member]
        self._checks = {
            n: checks_of(code, introductions[n])
            for n in self._others
            # A record that is not the one that was protected with ours proves nothing.
            if member.stripe_table and introductions[n].record == member.stripe_table[n]
        }
        self._buffers = {n: np.empty(code.block_bytes, np.uint8) for n in self._others}

    def run(self, places: Sequence[tuple[bool, int, Place]], result: RecomputedBlocks) -> None:
        for parity, number, place in places:
            solved = self._solve(place)
            if solved is None:
                result.left += 1
            else:
                (result.parity if parity else result.data)[number] = solved

    def _solve(self, place: Place) -> Bytes | None:
        window = Window(self._link)
        for source in self._others:
            window.post(partial(_receive, self._link, self._buffers[source], source))
        window.drain()
        return self._solver.solve_block(place, self._link.member, self._buffers, self._checks)


def checks_of(code: StripeCode, introduction: Introduction) -> Checks:
    """Checks of a member's data and of its parity; None for a region whose digests are wrong."""
    return _or_none(introduction.data_check, code), _or_none(introduction.parity_check, code)


def _or_none(make: Callable[[StripeCode], Check], code: StripeCode) -> Check | None:
    try:
        return make(code)
    except CorruptMemberError:
        return None
