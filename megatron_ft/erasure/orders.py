"""Orders of the SMP, carried out on this node's arenas, stripe after stripe.

All encoders of a world get an order's stripes in the same sequence, and every stripe
is finished before the next is begun, so no two encoders can wait for each other.
Parity is sent no faster than the cap allows.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader
from megatron_ft.core.background import Pace
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.erasure.block_repair import Damage, RecomputedBlocks, recompute
from megatron_ft.erasure.encode import EncodeResult, encode
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.rebuild import RebuildResult, rebuild
from megatron_ft.erasure.transport import Transport
from megatron_ft.rpc.messages import (
    Encoded,
    EncodeOrder,
    Message,
    OrderDone,
    RebuildOrder,
    Rebuilt,
    Recomputed,
    RepairOrder,
    StripeOrder,
)

Order = EncodeOrder | RebuildOrder | RepairOrder

_Result = TypeVar("_Result")


class ArenaShelf:
    """The node's arenas, kept mapped between orders; mapping a large one anew costs seconds."""

    def __init__(self, job: UUID) -> None:
        """An empty shelf; arenas of another job are refused."""
        self._job = job
        self._open: dict[str, tuple[int, Arena]] = {}

    def take(self, path: str) -> Arena:
        """The arena that has this path now: a file that was replaced is opened again."""
        inode = os.stat(path, follow_symlinks=False).st_ino
        known = self._open.get(path)
        if known is not None and known[0] == inode:
            return known[1]
        if known is not None:
            known[1].close()
        self._open[path] = inode, Arena.open(Path(path), job=self._job)
        return self._open[path][1]

    def drop(self, path: str) -> None:
        """Unmap an arena, so that what was a rebuild target is read-only from here on."""
        self._open.pop(path)[1].close()


class OrderRunner:
    """Runs orders for one encoder; ``open_transport`` gives a fresh view of the world."""

    def __init__(
        self,
        job: UUID,
        open_transport: Callable[[], Transport],
        encode_rate: float = 0.0,
    ) -> None:
        """Nothing is opened yet.

        While parity is made no more than ``encode_rate`` bytes a second are sent (0: no cap).
        Rebuilding is free: training waits for it.
        """
        self._encode_rate = encode_rate
        self._shelf, self._open_transport = ArenaShelf(job), open_transport
        self._rank = open_transport().rank

    def run(self, order: Order) -> Iterator[Message]:
        """Carry out an order; yields reports for the SMP as they become true, OrderDone last.

        Any exception leaves the world unusable, since other members may be waiting for ours.
        """
        for stripe in order.stripes:
            local = self._local_members(stripe)
            if isinstance(order, EncodeOrder):
                yield from self._encode(order, stripe, local)
            elif isinstance(order, RebuildOrder):
                yield from self._rebuild(order, stripe, local)
            else:
                yield from self._repair(order, stripe, local)
        yield OrderDone(order.snapshot, order.world)

    def _encode(
        self, order: EncodeOrder, stripe: StripeOrder, local: Sequence[int]
    ) -> Iterator[Message]:
        pace = Pace(self._encode_rate)

        def work(member: int, transport: Transport) -> EncodeResult:
            view = self._view(order.snapshot, stripe, member, parity=True)
            peers = stripe.world_ranks
            reach("encode.ordered")
            return encode(_code(stripe), view, transport, peers, index=member, pace=pace)

        for member, result, sent, seconds in self._together(local, work):
            _require_members(stripe, [r.shard_id for r in result.stripe_table])
            reach("encode.done")
            yield Encoded(
                snapshot=order.snapshot,
                world=order.world,
                shard_id=stripe.members[member],
                parity_root=result.parity_root,
                stripe_table=result.stripe_table,
                bytes_sent=sent,
                seconds=seconds,
            )

    def _rebuild(
        self, order: RebuildOrder, stripe: StripeOrder, local: Sequence[int]
    ) -> Iterator[Message]:
        lost = {stripe.members.index(shard) for shard in stripe.lost}

        def work(member: int, transport: Transport) -> RebuildResult:
            if member in lost:
                view = self._lost_view(stripe, member)
            else:
                view = self._view(order.snapshot, stripe, member)
            peers = stripe.world_ranks
            reach("rebuild.ordered")
            return rebuild(_code(stripe), view, transport, peers, lost, index=member)

        for member, result, sent, seconds in self._together(local, work):
            _require_members(stripe, [r.shard_id for r in result.stripe_table])
            _require_snapshot(order.snapshot, result.record.snapshot, stripe.members[member])
            if member in lost:
                reach("rebuild.done")
                yield Rebuilt(
                    snapshot=order.snapshot,
                    world=order.world,
                    shard_id=stripe.members[member],
                    record=result.record,
                    parity_root=result.parity_root,
                    stripe_table=result.stripe_table,
                    bytes_sent=sent,
                    seconds=seconds,
                )
                self._shelf.drop(stripe.arenas[stripe.members[member]])

    def _repair(
        self, order: RepairOrder, stripe: StripeOrder, local: Sequence[int]
    ) -> Iterator[Message]:
        target = stripe.members.index(order.shard_id)
        damage = Damage(order.data_blocks, order.parity_blocks)

        def work(member: int, transport: Transport) -> RecomputedBlocks:
            view = self._view(order.snapshot, stripe, member)
            peers = stripe.world_ranks
            return recompute(_code(stripe), view, transport, peers, target, damage, index=member)

        for member, result, _, _ in self._together(local, work):
            if member == target:
                yield Recomputed(
                    snapshot=order.snapshot,
                    world=order.world,
                    shard_id=order.shard_id,
                    data={number: raw.tobytes() for number, raw in result.data.items()},
                    parity={number: raw.tobytes() for number, raw in result.parity.items()},
                    left=result.left,
                )

    def _together(
        self, local: Sequence[int], work: Callable[[int, Transport], _Result]
    ) -> list[tuple[int, _Result, int, float]]:
        """Do our members' work at once, and add bytes sent and seconds.

        Two members of one stripe on one node (reduced protection) talk to each other, so
        neither can be done before the other; the transport must then allow threads.
        """

        def timed(member: int) -> tuple[int, _Result, int, float]:
            transport, start = self._open_transport(), time.monotonic()
            result = work(member, transport)
            return member, result, transport.bytes_sent, time.monotonic() - start

        if len(local) == 1:
            return [timed(local[0])]
        return _in_threads(timed, local)

    def _local_members(self, stripe: StripeOrder) -> list[int]:
        local = [m for m, rank in enumerate(stripe.world_ranks) if rank == self._rank]
        missing = {stripe.members[m] for m in local} ^ (stripe.arenas.keys() & stripe.slots.keys())
        if missing:
            raise ControlPlaneError(
                f"stripe {stripe.index}: ranks and arenas of the order disagree about "
                f"{', '.join(sorted(missing))} on rank {self._rank}"
            )
        return local

    def _view(
        self, snapshot: SnapshotId, stripe: StripeOrder, member: int, *, parity: bool = False
    ) -> MemberView:
        """A member that has its data, which is mapped read-only."""
        shard = stripe.members[member]
        arena, slot = self._shelf.take(stripe.arenas[shard]), stripe.slots[shard]
        header = arena.slot(slot)
        _require_sealed(snapshot, header, shard)
        return MemberView(
            data=arena.data(slot),
            parity=arena.parity(slot, writable=parity),
            parity_digests=arena.parity_digests(slot, writable=parity),
            record=header.record,
            parity_root=header.parity_root,
            stripe_table=header.stripe_table,
        )

    def _lost_view(self, stripe: StripeOrder, member: int) -> MemberView:
        shard = stripe.members[member]
        arena, slot = self._shelf.take(stripe.arenas[shard]), stripe.slots[shard]
        return MemberView(
            data=arena.data(slot, writable=True),
            parity=arena.parity(slot, writable=True),
            parity_digests=arena.parity_digests(slot, writable=True),
            record=None,
        )


def _in_threads(work: Callable[[int], _Result], members: Sequence[int]) -> list[_Result]:
    """Results in the order of ``members``; the first exception is raised at once.

    The other threads may then wait for ever for a peer that has given up, so they are
    daemons, and nobody joins them: the caller that gets the exception ends the process.
    """
    finished: queue.SimpleQueue[tuple[int, _Result | BaseException]] = queue.SimpleQueue()

    def attempt(member: int) -> None:
        try:
            finished.put((member, work(member)))
        except BaseException as error:  # raised again in the caller
            finished.put((member, error))

    for member in members:
        threading.Thread(target=attempt, args=(member,), daemon=True).start()
    results: dict[int, _Result] = {}
    while len(results) < len(members):
        member, outcome = finished.get()
        if isinstance(outcome, BaseException):
            raise outcome
        results[member] = outcome
    return [results[member] for member in members]


def _code(stripe: StripeOrder) -> StripeCode:
    return StripeCode(
        kind=stripe.kind,
        data_members=stripe.data_members,
        parity_members=stripe.parity_members,
        data_bytes=stripe.data_bytes,
        block_bytes=stripe.block_bytes,
        digest_algorithm=stripe.digest_algorithm,
    )


def _require_sealed(snapshot: SnapshotId, header: SlotHeader, shard: str) -> None:
    if header.record is None or header.record.shard_id != shard:
        raise ControlPlaneError(f"the slot of {shard} in this order holds no sealed shard of it")
    _require_snapshot(snapshot, header.record.snapshot, shard)


def _require_snapshot(wanted: SnapshotId, found: SnapshotId, shard: str) -> None:
    if found != wanted:
        raise ControlPlaneError(f"the order is for snapshot {wanted}, {shard} holds {found}")


def _require_members(stripe: StripeOrder, found: Sequence[str]) -> None:
    if tuple(found) != stripe.members:
        raise ControlPlaneError(
            f"stripe {stripe.index} has members {list(stripe.members)}, its shards say {found}"
        )
