"""Single wrong blocks of one member: finding them, recomputing them, putting them in place.

The scrub finds wrong blocks without peers.  To recompute them each other member sends its part of
the block's row; the damaged member checks every piece against its owner's digests and solves from
k that are right.  The result goes to the slot's owner, who writes only bytes that prove right.

Right bytes over wrong ones can be cut off at any point: a block that is half written is as wrong
as it was.  So no state of a slot changes, and nothing is lost by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.handshake import Introduction, agreed_records, introduce
from megatron_ft.erasure.member import (
    Check,
    CorruptMemberError,
    DataCheck,
    MemberView,
    StripeCode,
    digest_table_of,
    parity_digests_of,
    parity_root,
    piece_of,
)
from megatron_ft.erasure.transport import ExchangeWindow, Link, MessageKind, Transport, barrier


@dataclass(frozen=True)
class Damage:
    """Numbers of wrong blocks, ascending: in a slot's data region, and in its parity region.

    A parity block counts as wrong as well if its digest is.
    """

    data: tuple[int, ...] = ()
    parity: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of wrong blocks."""
        return len(self.data) + len(self.parity)

    def __or__(self, other: Damage) -> Damage:
        """Blocks that are wrong in either."""
        return Damage(
            tuple(sorted({*self.data, *other.data})), tuple(sorted({*self.parity, *other.parity}))
        )


class SlotInspector:
    """Checks a sealed slot a few blocks at a time.

    Blocks are numbered through: those of the data region (padding included), then, if
    ``parity`` is set, those of the parity region.  The digest table is copied and
    checked against its root when the inspector is made; what happens to it later shows
    as a wrong block.
    """

    def __init__(self, code: StripeCode, member: MemberView, *, parity: bool) -> None:
        """Take a member with a record, to which its data is compared."""
        assert member.record is not None, "a slot without a record cannot be inspected"
        self._code, self._member, self._record = code, member, member.record
        self.data_blocks = code.data_bytes // code.block_bytes
        self.blocks = self.data_blocks + (code.parity_blocks if parity else 0)
        try:
            table = np.frombuffer(digest_table_of(member).tobytes(), np.uint8)
            self._check: DataCheck | None = DataCheck(code, self._record, table)
        except CorruptMemberError:
            self._check = None

    def damage(self, first: int, stop: int) -> Damage:
        """Wrong blocks among [first, stop).

        With a damaged digest table nothing is known of the data: the blocks that hold the
        table are named, and the rest once those are repaired.
        """
        edge = self.data_blocks
        data = self._bad_data(first, min(stop, edge)) if first < edge else ()
        start, end = max(first - edge, 0), stop - edge
        return Damage(data, self._bad_parity(start, end) if end > start else ())

    def _bad_data(self, first: int, stop: int) -> tuple[int, ...]:
        if self._check is None:
            return tuple(block for block in self._table_blocks() if first <= block < stop)
        size, check = self._code.block_bytes, self._check
        if not check.bad_blocks(first * size, self._member.data[first * size : stop * size]):
            return ()
        # Of wrong padding it names the first block only, so each is asked for by itself.
        data, blocks = self._member.data, range(first, stop)
        return tuple(b for b in blocks if check.bad_blocks(b * size, block_of(self._code, data, b)))

    def _table_blocks(self) -> range:
        return table_blocks(self._code, self._member)

    def _bad_parity(self, first: int, stop: int) -> tuple[int, ...]:
        size = self._code.block_bytes
        found = parity_digests_of(self._code, self._member.parity[first * size : stop * size])
        wrong = np.flatnonzero(found != self._member.parity_digests[first:stop])
        return tuple(int(block) for block in first + wrong)


def table_blocks(code: StripeCode, member: MemberView) -> range:
    """Numbers of the data blocks that hold some of the digest table."""
    record, size = member.record, code.block_bytes
    assert record is not None
    start = min(max(record.digest_offset, 0), code.data_bytes)
    stop = min(max(record.used_bytes, start), code.data_bytes)
    return range(start // size, -(-stop // size))


def block_of(code: StripeCode, region: Bytes, block: int) -> Bytes:
    """One block of a data or parity region; both are whole blocks."""
    return region[block * code.block_bytes : (block + 1) * code.block_bytes]


Blocks = Mapping[int, Bytes]
"""Block numbers, and the whole blocks that belong there."""


def mend_data(code: StripeCode, member: MemberView, blocks: Blocks) -> bool:
    """Write blocks into the member's data region; False, with nothing written, if one is wrong.

    What proves them is the digest table as it will be with them, which the root in the slot's
    header proves in turn: all damaged blocks of the table itself must be among them.
    """
    assert member.record is not None, "nothing says what the blocks should be"
    if not _are_whole(code, blocks, code.data_bytes):
        return False
    try:
        check = DataCheck(code, member.record, _table_with(code, member, blocks))
    except CorruptMemberError:
        return False
    if any(check.bad_blocks(number * code.block_bytes, raw) for number, raw in blocks.items()):
        return False
    for number, raw in blocks.items():
        block_of(code, member.data, number)[:] = raw
    return True


def mend_parity(code: StripeCode, member: MemberView, blocks: Blocks) -> bool:
    """Write blocks of parity and their digests; False, with nothing written, if one is wrong.

    The root in the slot's header proves all digests together, so every damaged one must be
    among the blocks.
    """
    if not _are_whole(code, blocks, code.parity_bytes):
        return False
    digests = member.parity_digests.copy()
    for number, raw in blocks.items():
        digests[number] = parity_digests_of(code, raw)[0]
    if parity_root(digests) != member.parity_root:
        return False
    for number, raw in blocks.items():
        block_of(code, member.parity, number)[:] = raw
    member.parity_digests[:] = digests
    return True


def _are_whole(code: StripeCode, blocks: Blocks, region_bytes: int) -> bool:
    """True if all are whole blocks inside the region; a peer may have sent them."""
    count = region_bytes // code.block_bytes
    return all(0 <= n < count and raw.nbytes == code.block_bytes for n, raw in blocks.items())


def _table_with(code: StripeCode, member: MemberView, blocks: Blocks) -> Bytes:
    """The member's digest table as it will be once the blocks are written."""
    assert member.record is not None
    table = digest_table_of(member).copy()
    start, stop, size = member.record.digest_offset, member.record.used_bytes, code.block_bytes
    for number, raw in blocks.items():
        low, high = max(number * size, start), min((number + 1) * size, stop)
        if low < high:
            table[low - start : high - start] = raw[low - number * size : high - number * size]
    return np.ascontiguousarray(table)


@dataclass(frozen=True)
class Place:
    """Place of a block in its stripe: its row, its symbol there, its offset in the chunk."""

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


Checks = tuple[Check | None, Check | None]
"""Checks of a member's data and of its parity; None where its digests prove nothing."""


class RowSolver:
    """Solves rows of one stripe."""

    def __init__(self, code: StripeCode) -> None:
        self._code, self._codec = code, code.codec()

    def solve(self, row: int, pieces: Mapping[int, Bytes], wanted: Sequence[int]) -> list[Bytes]:
        """The pieces of the ``wanted`` members, in new buffers, from those of k other members."""
        layout = self._code.layout
        given = [layout.symbol(row, member) for member in pieces]
        missing = [layout.symbol(row, member) for member in wanted]
        sources = list(pieces.values())
        outputs = [np.empty_like(sources[0]) for _ in wanted]
        self._codec.kernel(missing, given)(sources, outputs)
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
    places, result = places_of(code, target, damage), RecomputedBlocks()
    if link.member == target:
        _take_and_solve(link, code, member, introductions, places, result)
    else:
        window = ExchangeWindow(link)
        for _, _, place in places:
            part = slice(place.offset, place.offset + code.block_bytes)
            piece = piece_of(code, member, link.member, place.row, part)
            window.post(partial(_send, link, piece, target))
        window.drain()
    barrier(link)
    return result


def _send(link: Link, piece: Bytes, target: int) -> list[object]:
    return [link.send(piece, target, MessageKind.SOURCE)]


def _receive(link: Link, buffer: Bytes, source: int) -> list[object]:
    return [link.receive(buffer, source, MessageKind.SOURCE)]


def _take_and_solve(
    link: Link,
    code: StripeCode,
    member: MemberView,
    introductions: Mapping[int, Introduction],
    places: Sequence[tuple[bool, int, Place]],
    result: RecomputedBlocks,
) -> None:
    """Receive a row's block from every other member, and solve; place after place."""
    others = [n for n in range(code.members) if n != link.member]
    checks = {
        n: checks_of(code, introductions[n])
        for n in others
        # A record that is not the one that was protected with ours proves nothing.
        if member.stripe_table and introductions[n].record == member.stripe_table[n]
    }
    buffers = {n: np.empty(code.block_bytes, np.uint8) for n in others}
    solver = RowSolver(code)
    for parity, number, place in places:
        window = ExchangeWindow(link)
        for source in others:
            window.post(partial(_receive, link, buffers[source], source))
        window.drain()
        solved = solver.solve_block(place, link.member, buffers, checks)
        if solved is None:
            result.left += 1
        else:
            (result.parity if parity else result.data)[number] = solved


def checks_of(code: StripeCode, introduction: Introduction) -> Checks:
    """Checks of a member's data and of its parity; None for a region whose digests are wrong."""
    return _or_none(introduction.data_check, code), _or_none(introduction.parity_check, code)


def _or_none(make: Callable[[StripeCode], Check], code: StripeCode) -> Check | None:
    try:
        return make(code)
    except CorruptMemberError:
        return None
