"""Rebuilds shards from the parity of their stripes, for a reader.

Nothing is written to arenas: what is rebuilt lies in private memory and is compared with the
digests that were taken at capture.  ``rebuild`` replaces a shard that is lost or damaged.
``rebuild_node`` rebuilds a whole node's shards as if it were lost, and compares them with the
live ones.  Repairing the arenas is left to the job's scrub and its recoveries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.decide import Holding
from megatron_ft.core.errors import ArenaError, SnapshotUnavailableError
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.block_repair import Checks, RowSolver, block_of, piece_of, place_of
from megatron_ft.erasure.member import (
    CorruptMemberError,
    DataCheck,
    MemberView,
    ParityCheck,
    StripeCode,
    code_of,
    digest_table_of,
    member_of,
)

Arenas = Mapping[tuple[str, str], Arena]
"""Arenas by node and shard."""


@dataclass(frozen=True)
class Survivors:
    """Members of one stripe that hold a protected snapshot, by their number in the stripe.

    ``table`` has the record of every member, as all survivors stored it.
    """

    holdings: Mapping[int, Holding]
    table: tuple[SealedRecord, ...]
    missing: int

    @classmethod
    def find(
        cls, holdings: Mapping[str, Holding], shard_id: str, snapshot: SnapshotId
    ) -> Survivors:
        """Survivors that can rebuild ``shard_id``; SnapshotUnavailableError if they are too few."""
        naming = [h.arena for h in holdings.values() if shard_id in h.arena.members]
        if not naming:
            raise SnapshotUnavailableError(f"no arena here is of a stripe with {shard_id}")
        newest = max(naming, key=lambda arena: arena.incarnation)
        found, tables = {}, set()
        for number, member in enumerate(newest.members):
            holding = holdings.get(member)
            slot = None if holding is None else holding.slot(snapshot)
            if holding is None or slot is None or member == shard_id:
                continue
            table = slot.stripe_table
            if not slot.parity_valid or len(table) <= number or slot.record != table[number]:
                continue
            found[number] = holding
            tables.add(table)
        if len(found) < newest.data_members:
            raise SnapshotUnavailableError(
                f"{len(found)} of the other {len(newest.members) - 1} shards of its stripe are here"
                f" with parity, and a rebuild needs {newest.data_members}"
            )
        if len(tables) > 1:
            raise SnapshotUnavailableError("the shards of its stripe disagree on what it held")
        return cls(found, tables.pop(), newest.members.index(shard_id))

    @property
    def record(self) -> SealedRecord:
        """Record of what the missing shard held."""
        return self.table[self.missing]


def rebuild(
    survivors: Survivors,
    snapshot: SnapshotId,
    arenas: Arenas,
    own: Arena | None,
) -> Bytes:
    """The sealed region of the missing shard in new memory; the caller verifies it.

    Blocks of ``own``, the shard's arena if there is one, are used where their digests match.
    SnapshotUnavailableError names the first block for which too few right ones are left.
    """
    stripe = _Stripe(survivors, snapshot, arenas)
    code = stripe.code
    own_data, check = _own_data(own, snapshot, survivors.record, code)
    result: Bytes = np.zeros(code.data_bytes, np.uint8)
    for block in range(-(-survivors.record.used_bytes // code.block_bytes)):
        held = block_of(code, own_data, block)
        right = check is not None and not check.bad_blocks(block * code.block_bytes, held)
        block_of(code, result, block)[:] = held if right else stripe.solve(block, parity=False)
    return result


class _Stripe:
    """The survivors' bytes, from which blocks of the missing member are solved."""

    def __init__(self, survivors: Survivors, snapshot: SnapshotId, arenas: Arenas) -> None:
        self._missing = survivors.missing
        self._views: dict[int, MemberView] = {}
        for number, holding in survivors.holdings.items():
            arena = arenas[holding.node, holding.arena.shard_id]
            self.code, self._views[number] = code_of(arena.header), _view(arena, holding, snapshot)
        self._checks = {number: _checks(self.code, view) for number, view in self._views.items()}
        self._solver = RowSolver(self.code)

    def solve(self, block: int, *, parity: bool) -> Bytes:
        """A block of the missing member's data or parity; SnapshotUnavailableError."""
        code = self.code
        place = place_of(code, self._missing, block, parity=parity)
        part = slice(place.offset, place.offset + code.block_bytes)
        pieces = {n: piece_of(code, view, n, place.row, part) for n, view in self._views.items()}
        solved = self._solver.solve_block(place, self._missing, pieces, self._checks)
        if solved is None:
            region = "parity block" if parity else "block"
            raise SnapshotUnavailableError(
                f"at {region} {block} fewer than {code.data_members} shards of its stripe are right"
            )
        return solved


def _view(arena: Arena, holding: Holding, snapshot: SnapshotId) -> MemberView:
    report = holding.slot(snapshot)
    assert report is not None, "the holding has the snapshot"
    number = holding.arena.slots.index(report)
    return member_of(arena, number, arena.slot(number))


def _checks(code: StripeCode, view: MemberView) -> Checks:
    if view.record is None:
        raise SnapshotUnavailableError("a slot of its stripe was given up while it was read")
    data = parity = None
    with suppress(CorruptMemberError):
        data = DataCheck(code, view.record, digest_table_of(view))
    with suppress(CorruptMemberError):
        parity = ParityCheck(code, view.record.shard_id, view.parity_digests, view.parity_root)
    return data, parity


def _own_data(
    own: Arena | None, snapshot: SnapshotId, record: SealedRecord, code: StripeCode
) -> tuple[Bytes, DataCheck | None]:
    """The slot of the shard's own arena that holds this record, if its digest table is right."""
    slots = own.geometry.slot_count if own is not None and code_of(own.header) == code else 0
    for slot in range(slots):
        assert own is not None
        with suppress(CorruptMemberError, ArenaError):
            header = own.slot(slot)
            if header.snapshot == snapshot and header.record == record:
                view = member_of(own, slot, header)
                # A copy, as the slot may be given up meanwhile.
                return view.data, DataCheck(code, record, digest_table_of(view).copy())
    return np.empty(0, np.uint8), None


@dataclass(frozen=True)
class RebuiltNode:
    """Outcome of rebuilding one node's shards.

    ``bytes`` counts what was rebuilt, data and parity.  ``problem`` is empty if every byte
    equals the live one and matches its digest.
    """

    node: str
    shards: int
    bytes: int
    seconds: float
    problem: str


def rebuild_node(
    holdings: Mapping[str, Holding], arenas: Arenas, node: str, snapshot: SnapshotId
) -> RebuiltNode:
    """Rebuild a node's shards of a protected snapshot from those of all other nodes.

    Scratch memory is a few blocks, whatever the shards' size.
    """
    others = {shard: holding for shard, holding in holdings.items() if holding.node != node}
    lost = [s for s, h in holdings.items() if h.node == node and h.slot(snapshot) is not None]
    started, size, problem = time.monotonic(), 0, ""
    for shard in sorted(lost):
        try:
            live = _view(arenas[node, shard], holdings[shard], snapshot)
            stripe = _Stripe(Survivors.find(others, shard, snapshot), snapshot, arenas)
            size += _compare_rebuilt(stripe, live)
        except (SnapshotUnavailableError, CorruptMemberError, ArenaError) as error:
            problem = f"{shard} cannot be rebuilt as it is: {error}"
            break
    return RebuiltNode(node, len(lost), size, time.monotonic() - started, problem)


def _compare_rebuilt(stripe: _Stripe, live: MemberView) -> int:
    """Rebuild the missing member's data and parity and compare; bytes rebuilt.

    SnapshotUnavailableError if a live byte differs, CorruptMemberError if a digest does.
    """
    code, record = stripe.code, live.record
    if record is None:
        raise SnapshotUnavailableError("its slot was given up while it was read")
    data = DataCheck(code, record, digest_table_of(live))
    parity = ParityCheck(code, record.shard_id, live.parity_digests, live.parity_root)
    regions = (False, live.data, data), (True, live.parity, parity)
    for in_parity, region, check in regions:
        for block in range(region.nbytes // code.block_bytes):
            rebuilt = stripe.solve(block, parity=in_parity)
            if not np.array_equal(rebuilt, block_of(code, region, block)):
                raise SnapshotUnavailableError(
                    f"rebuilt bytes differ from the live ones in block {block} of its "
                    f"{'parity' if in_parity else 'data'}"
                )
            check.require(block * code.block_bytes, rebuilt)
    return code.data_bytes + code.parity_bytes
