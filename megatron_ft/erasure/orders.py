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
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader
from megatron_ft.core import private_files, procfs
from megatron_ft.core.background import Pace
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.shard import ShardLayout, unpack_meta
from megatron_ft.erasure.encode import EncodeResult, encode
from megatron_ft.erasure.member import MemberView, StripeCode, member_of
from megatron_ft.erasure.rebuild import RebuildResult, rebuild
from megatron_ft.erasure.reshape import HeldShard, NewShard, reshape
from megatron_ft.erasure.transport import Transport
from megatron_ft.rpc.messages import (
    Encoded,
    EncodeOrder,
    Message,
    OrderDone,
    PlacedShard,
    RebuildOrder,
    Rebuilt,
    Reshaped,
    ReshapeOrder,
    StripeOrder,
)

Order = EncodeOrder | RebuildOrder | ReshapeOrder

_Result = TypeVar("_Result")


class _Done(NamedTuple):
    """One member's finished part of an order."""

    member: int
    result: EncodeResult | RebuildResult
    bytes_sent: int
    seconds: float


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
        if isinstance(order, ReshapeOrder):
            yield from self._reshape(order)
            yield OrderDone(order.snapshot, order.world)
            return
        pace = Pace(self._encode_rate)
        for stripe in order.stripes:

            def timed(member: int, stripe: StripeOrder = stripe) -> _Done:
                transport, start = self._open_transport(), time.monotonic()
                result = self._work(order, stripe, member, transport, pace)
                return _Done(member, result, transport.bytes_sent, time.monotonic() - start)

            local = self._local_members(stripe)
            # Two members of one stripe on one node (reduced protection) talk to each other, so
            # neither can be done before the other; the transport must then allow threads.
            finished = _in_threads(timed, local) if len(local) > 1 else map(timed, local)
            for done in list(finished):
                yield from self._reports(order, stripe, done)
        yield OrderDone(order.snapshot, order.world)

    def _reshape(self, order: ReshapeOrder) -> Iterator[Message]:
        """Fill this node's shards of a new layout; a report of each."""
        before = procfs.storage_bytes_read()
        held = {shard: self._held(order, shard, place) for shard, place in order.held.items()}
        new = {shard: self._new(place) for shard, place in order.new.items()}
        reach("reshape.ordered")
        done = reshape(
            self._open_transport(),
            order.ranks,
            held,
            new,
            snapshot=order.snapshot,
            iteration=order.iteration,
        )
        for result in done.values():
            now = procfs.storage_bytes_read()
            yield Reshaped(
                world=order.world,
                record=result.record,
                bytes_needed=result.bytes_needed,
                bytes_received=result.bytes_received,
                storage_bytes_read=None if now is None or before is None else now - before,
            )
            before = now
        for place in order.new.values():
            self._shelf.drop(place.arena)

    def _held(self, order: ReshapeOrder, shard: str, place: PlacedShard) -> HeldShard:
        arena = self._shelf.take(place.arena)
        header = arena.slot(place.slot)
        _require_sealed(order.source, header, shard)
        assert header.record is not None, "sealed"
        data = arena.data(place.slot)[: header.record.used_bytes]
        return HeldShard(header.record, data, arena.geometry.block_bytes)

    def _new(self, place: PlacedShard) -> NewShard:
        arena = self._shelf.take(place.arena)
        meta = unpack_meta(private_files.read_file(Path(place.layout)))
        data = arena.data(place.slot, writable=True)
        layout = ShardLayout.from_bytes(meta.layout)
        return NewShard(layout, meta.form, data, arena.geometry.block_bytes)

    def _work(
        self,
        order: EncodeOrder | RebuildOrder,
        stripe: StripeOrder,
        member: int,
        transport: Transport,
        pace: Pace,
    ) -> EncodeResult | RebuildResult:
        """Do one member's part of an order on one stripe."""
        code, peers = _code(stripe), stripe.world_ranks
        if isinstance(order, EncodeOrder):
            view = self._view(order.snapshot, stripe, member, parity=True)
            reach("encode.ordered")
            return encode(code, view, transport, peers, index=member, pace=pace)
        lost = {stripe.members.index(shard) for shard in stripe.lost}
        if member in lost:
            view = self._lost_view(stripe, member)
        else:
            view = self._view(order.snapshot, stripe, member)
        reach("rebuild.ordered")
        return rebuild(code, view, transport, peers, lost, index=member)

    def _reports(
        self, order: EncodeOrder | RebuildOrder, stripe: StripeOrder, done: _Done
    ) -> Iterator[Message]:
        """The report to the SMP of one member's part; a survivor of a rebuild sends none."""
        result, shard = done.result, stripe.members[done.member]
        _require_members(stripe, [r.shard_id for r in result.stripe_table])
        known: dict[str, Any] = {
            "snapshot": order.snapshot,
            "world": order.world,
            "shard_id": shard,
            "parity_root": result.parity_root,
            "stripe_table": result.stripe_table,
            "bytes_sent": done.bytes_sent,
            "seconds": done.seconds,
        }
        if isinstance(result, EncodeResult):
            reach("encode.done")
            yield Encoded(**known)
            return
        _require_snapshot(order.snapshot, result.record.snapshot, shard)
        if shard in stripe.lost:
            reach("rebuild.done")
            yield Rebuilt(record=result.record, **known)
            self._shelf.drop(stripe.arenas[shard])

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
        return member_of(arena, slot, header, parity=parity)

    def _lost_view(self, stripe: StripeOrder, member: int) -> MemberView:
        shard = stripe.members[member]
        arena, slot = self._shelf.take(stripe.arenas[shard]), stripe.slots[shard]
        return member_of(arena, slot, SlotHeader(), data=True, parity=True)


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
