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
    code, views = _views(survivors, snapshot, arenas)
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


def _views(
    survivors: Survivors, snapshot: SnapshotId, arenas: Arenas
) -> tuple[StripeCode, dict[int, MemberView]]:
    """The stripe's numbers, and the bytes of each survivor."""
    views = {}
    for number, holding in survivors.holdings.items():
        arena = arenas[holding.node, holding.arena.shard_id]
        code, views[number] = code_of(arena.header), _view(arena, holding, snapshot)
    return code, views


def _view(arena: Arena, holding: Holding, snapshot: SnapshotId) -> MemberView:
    report = holding.slot(snapshot)
    assert report is not None, "the holding has the snapshot"
    return member_of(arena, report.slot, arena.slot(report.slot))


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

    Scratch memory is a few pieces of a chunk, whatever the shards' size.
    """
    others = {shard: holding for shard, holding in holdings.items() if holding.node != node}
    lost = [s for s, h in holdings.items() if h.node == node and h.slot(snapshot) is not None]
    started, size, problem = time.monotonic(), 0, ""
    for shard in sorted(lost):
        try:
            live = _view(arenas[node, shard], holdings[shard], snapshot)
            survivors = Survivors.find(others, shard, snapshot)
            size += _compare_rebuilt(survivors, live, *_views(survivors, snapshot, arenas))
        except (SnapshotUnavailableError, CorruptMemberError, ArenaError) as error:
            problem = f"{shard} cannot be rebuilt as it is: {error}"
            break
    return RebuiltNode(node, len(lost), size, time.monotonic() - started, problem)


def _compare_rebuilt(
    survivors: Survivors, live: MemberView, code: StripeCode, views: dict[int, MemberView]
) -> int:
    """Rebuild the missing member's data and parity and compare; bytes rebuilt.

    Every survivor's bytes are checked.  Each row is solved from the next k of them in turn.
    SnapshotUnavailableError if a live byte differs, CorruptMemberError for a damaged survivor.
    """
    missing, others = survivors.missing, sorted(views)
    checks = {n: _strict_checks(code, view) for n, view in (*views.items(), (missing, live))}
    solver, total = RowSolver(code), 0
    for row in range(code.members):
        chosen = [others[(row + n) % len(others)] for n in range(code.data_members)]
        for part in code.pieces():
            pieces = {n: piece_of(code, views[n], n, row, part) for n in others}
            for number, piece in pieces.items():
                _require(code, checks[number], number, row, part, piece)
            (rebuilt,) = solver.solve(row, {n: pieces[n] for n in chosen}, [missing])
            if not np.array_equal(rebuilt, piece_of(code, live, missing, row, part)):
                raise SnapshotUnavailableError(
                    f"rebuilt bytes differ from the live ones in row {row} at byte {part.start}"
                )
            _require(code, checks[missing], missing, row, part, rebuilt)
            total += rebuilt.nbytes
    return total


def _strict_checks(code: StripeCode, view: MemberView) -> tuple[DataCheck, ParityCheck]:
    if view.record is None:
        raise SnapshotUnavailableError("a slot of its stripe was given up while it was read")
    data = DataCheck(code, view.record, digest_table_of(view))
    return data, ParityCheck(code, view.record.shard_id, view.parity_digests, view.parity_root)


def _require(
    code: StripeCode,
    checks: tuple[DataCheck, ParityCheck],
    member: int,
    row: int,
    part: slice,
    piece: Bytes,
) -> None:
    symbol = code.layout.symbol(row, member)
    check = checks[code.layout.is_parity(symbol)]
    check.require(code.layout.chunk(symbol) * code.chunk_bytes + part.start, piece)
