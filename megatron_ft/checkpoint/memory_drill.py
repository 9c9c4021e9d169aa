"""The fire drill on a job's arenas: rebuild one shard into scratch memory, compare, touch nothing.

It runs beside training: the snapshot is pinned with the SMPs for as long as it is read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint.decide import candidates
from megatron_ft.checkpoint.live import Memory, scan
from megatron_ft.core.errors import SnapshotUnavailableError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.erasure.checks import CorruptMemberError
from megatron_ft.erasure.drill import drill
from megatron_ft.erasure.member import code_of, member_of
from megatron_ft.rpc.local_query import pinned

MOST_TRIES = 16


@dataclass(frozen=True)
class DrillReport:
    """What a drill found.  ``problem`` is empty if the rebuilt bytes are those that are there.

    ``sources`` lists the shards from which each row of the stripe was solved; ``bytes``
    counts what was rebuilt, data and parity.
    """

    snapshot: SnapshotId
    iteration: int
    shard_id: str
    node: str
    sources: tuple[tuple[str, ...], ...]
    bytes: int
    seconds: float
    problem: str


@dataclass(frozen=True)
class _Stripe:
    """The slots of one snapshot in the stripe of the shard that is "lost"."""

    snapshot: SnapshotId
    target: str
    members: tuple[str, ...]
    slots: Mapping[str, tuple[int, SlotHeader]]


def run_drill(
    folders: Sequence[Path],
    dice: random.Random,
    *,
    shard: str = "",
    pace: Callable[[int], None] = lambda length: None,
) -> DrillReport:
    """Drill on the newest protected snapshot in these nodes' folders.

    ``shard`` is the one to lose, by default one drawn by ``dice``.  SnapshotUnavailableError
    if no protected snapshot can be held, and when it was given up while it was read.
    """
    for _ in range(MOST_TRIES):
        with scan(folders) as memory:
            stripe = _choose(memory, dice, shard)
            nodes = sorted({memory.holdings[s].node for s in stripe.slots})
            try:
                with pinned([memory.folders[node] for node in nodes], stripe.snapshot):
                    return _drill(memory, stripe, dice, pace)
            except _SupersededError:
                continue  # by a newer one, before it was held
    raise SnapshotUnavailableError(f"{MOST_TRIES} snapshots were superseded before they were held")


class _SupersededError(Exception):
    """The slot was given to another snapshot before or while it was read."""


def _choose(memory: Memory, dice: random.Random, shard: str) -> _Stripe:
    here = sorted(memory.holdings)
    if shard and shard not in memory.holdings:
        raise SnapshotUnavailableError(f"no arena of {shard} is here; there are {', '.join(here)}")
    target = shard or dice.choice(here)
    arena = memory.holdings[target].arena
    if not arena.parity_members:
        raise SnapshotUnavailableError("the job keeps no parity: nothing could be rebuilt")
    for snapshot in candidates(memory.holdings):
        slots = _protected(memory, arena.members, snapshot)
        if target in slots and len(slots) > arena.data_members:
            return _Stripe(snapshot, target, arena.members, slots)
    raise SnapshotUnavailableError(f"no snapshot of the stripe of {target} is protected (yet)")


def _protected(
    memory: Memory, members: Sequence[str], snapshot: SnapshotId
) -> dict[str, tuple[int, SlotHeader]]:
    """Committed slots with valid parity, by shard, as their headers are now."""
    found = {}
    for shard in members:
        holding = memory.holdings.get(shard)
        report = None if holding is None else holding.slot(snapshot)
        if holding is None or report is None:
            continue
        header = memory.arenas[holding.node, shard].slot(report.slot)
        committed = header.state == SlotState.COMMITTED and header.snapshot == snapshot
        if committed and header.parity_valid:
            found[shard] = report.slot, header
    return found


def _drill(
    memory: Memory, stripe: _Stripe, dice: random.Random, pace: Callable[[int], None]
) -> DrillReport:
    _require_unchanged(memory, stripe)
    arenas = {s: memory.arenas[memory.holdings[s].node, s] for s in stripe.slots}
    views = {stripe.members.index(s): member_of(arenas[s], *stripe.slots[s]) for s in stripe.slots}
    code = code_of(arenas[stripe.target].header)
    target, started = stripe.members.index(stripe.target), time.monotonic()
    problem, length = "", 0
    sources: tuple[tuple[int, ...], ...] = ()
    try:
        found = drill(code, views, target, dice, pace=pace)
        sources, length = found.sources, found.bytes
        if found.differing:
            row, at = found.differing[0]
            problem = (
                f"{len(found.differing)} rebuilt pieces differ from the live ones, the first in "
                f"row {row} at byte {at} of its chunk"
            )
    except CorruptMemberError as error:
        problem = str(error)
    seconds = time.monotonic() - started
    _require_unchanged(memory, stripe)
    return DrillReport(
        snapshot=stripe.snapshot,
        iteration=stripe.slots[stripe.target][1].iteration,
        shard_id=stripe.target,
        node=memory.holdings[stripe.target].node,
        sources=tuple(tuple(stripe.members[n] for n in row) for row in sources),
        bytes=length,
        seconds=seconds,
        problem=problem,
    )


def _require_unchanged(memory: Memory, stripe: _Stripe) -> None:
    """A slot's header changes before its bytes do."""
    if _protected(memory, stripe.members, stripe.snapshot).keys() != stripe.slots.keys():
        raise _SupersededError
