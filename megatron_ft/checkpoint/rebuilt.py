"""A shard that is lost or damaged in memory, computed from its stripe for a reader.

Nothing is written to arenas: a reader gets a private copy, checked against the digests that were
taken at capture.  Repairing the arenas is left to the job's scrub and its recoveries.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.decide import Holding
from megatron_ft.core.errors import ArenaError, SnapshotUnavailableError
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import CorruptMemberError, DataCheck, ParityCheck, digest_table_of
from megatron_ft.erasure.inspection import block_of
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.slot_view import code_of, member_of
from megatron_ft.erasure.solving import Checks, RowSolver, piece_of, place_of


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
        """Those that can rebuild ``shard_id``; SnapshotUnavailableError if they are too few."""
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
        """What the missing shard held."""
        return self.table[self.missing]


def rebuild(
    survivors: Survivors,
    snapshot: SnapshotId,
    arenas: Mapping[tuple[str, str], Arena],
    own: Arena | None,
) -> Bytes:
    """The sealed region of the missing shard in new memory; the caller verifies it.

    Blocks of ``own``, the shard's arena if there is one, are used where their digests match.
    SnapshotUnavailableError names the first block for which too few right ones are left.
    """
    members = {
        number: (arenas[holding.node, holding.arena.shard_id], _slot(holding, snapshot))
        for number, holding in survivors.holdings.items()
    }
    code = code_of(next(iter(members.values()))[0].header)
    views = {n: member_of(arena, slot, arena.slot(slot)) for n, (arena, slot) in members.items()}
    checks = {number: _checks(code, view) for number, view in views.items()}
    mine, my_check = _own_view(own, snapshot, survivors.record, code)
    solver, size = RowSolver(code), code.block_bytes
    result: Bytes = np.zeros(code.data_bytes, np.uint8)
    for block in range(-(-survivors.record.used_bytes // size)):
        into = block_of(code, result, block)
        if mine is not None and my_check is not None:
            held = block_of(code, mine.data, block)
            if not my_check.bad_blocks(block * size, held):
                into[:] = held
                continue
        place = place_of(code, survivors.missing, block, parity=False)
        part = slice(place.offset, place.offset + size)
        pieces = {n: piece_of(code, view, n, place.row, part) for n, view in views.items()}
        solved = solver.solve_block(place, survivors.missing, pieces, checks)
        if solved is None:
            raise SnapshotUnavailableError(
                f"at block {block} fewer than {code.data_members} shards of its stripe are right"
            )
        into[:] = solved
    return result


def _slot(holding: Holding, snapshot: SnapshotId) -> int:
    report = holding.slot(snapshot)
    assert report is not None, "survivors hold the snapshot"
    return report.slot


def _checks(code: StripeCode, view: MemberView) -> Checks:
    assert view.record is not None, "survivors have sealed their slot"
    data = parity = None
    with suppress(CorruptMemberError):
        data = DataCheck(code, view.record, digest_table_of(view))
    with suppress(CorruptMemberError):
        parity = ParityCheck(code, view.record.shard_id, view.parity_digests, view.parity_root)
    return data, parity


def _own_view(
    own: Arena | None, snapshot: SnapshotId, record: SealedRecord, code: StripeCode
) -> tuple[MemberView | None, DataCheck | None]:
    """The slot of the shard's own arena that holds this record, if its digest table is right."""
    if own is None or code_of(own.header) != code:
        return None, None
    for slot in range(own.geometry.slot_count):
        with suppress(CorruptMemberError, ArenaError):
            header = own.slot(slot)
            if header.snapshot == snapshot and header.record == record:
                view = member_of(own, slot, header)
                # A copy, as the slot may be given up meanwhile.
                return view, DataCheck(code, record, digest_table_of(view).copy())
    return None, None
