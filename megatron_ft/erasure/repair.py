"""Recompute single blocks of one member from the others, while its slot stays what it is.

Each other member sends what it keeps of the block's row; the damaged member checks every
piece against its owner's digests and solves from k that are right.  Nothing is written
here: the caller gives the blocks to the slot's owner, who proves them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import Check, CorruptMemberError
from megatron_ft.erasure.codec import Codec
from megatron_ft.erasure.inspection import Damage
from megatron_ft.erasure.introduce import Introduction, agreed_records, introduce
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.solving import Checks, Place, RowSolver, piece_of, places_of
from megatron_ft.erasure.transport import Kind, Link, Transport, Window, barrier


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
