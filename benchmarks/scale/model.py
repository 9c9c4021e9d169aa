"""One snapshot of a job of any size, driven through the coordinator's own state machine.

Nothing is started: ``SnapshotCycle`` decides as it does in a job, nodes answer at once, and
every message is encoded as it is on the wire.  What encoders send is arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.scale.tally import Tally, kind_of
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import RankPlace
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import EventBatch, EventSubscription, Outbox
from megatron_ft.supervisor.cycle import Action, Send, SnapshotCycle, SnapshotEnded
from megatron_ft.supervisor.orders import stripe_orders
from megatron_ft.supervisor.registration import new_stripes
from megatron_ft.supervisor.schedule import Schedule

WORLD = "w1"

DIGEST_BYTES, RECORD_BYTES = 8, 250
"""Of a block, and of what a member says of itself besides; the latter is about right."""


@dataclass(frozen=True)
class Shape:
    """A job: ``data_bytes`` is a shard's length in the arena."""

    nodes: int
    ranks_per_node: int
    protect: str
    data_bytes: int
    block_bytes: int = BLOCK_BYTES

    @property
    def ranks(self) -> int:
        """All trainers."""
        return self.nodes * self.ranks_per_node


def control_messages(shape: Shape) -> Tally:
    """All that the coordinator sends and reads from permit to commit, and its processor time."""
    places, stripes = _stripes(shape)
    nodes = sorted(set(places.values()))
    orders = stripe_orders(stripes, places, nodes)
    cycle, tally = SnapshotCycle(1, places, orders, Schedule(1)), Tally()
    outboxes = {node: Outbox(1 << 31) for node in nodes}
    inboxes = {node: EventSubscription() for node in nodes}
    tables = {s: tuple(map(_record, st.members)) for st in stripes for s in st.members}
    waiting: list[Action] = list(cycle.propose(10, WORLD))
    while waiting:
        events = _events(waiting, places, tables, outboxes)
        frames = [m.encode(event) for event in events]
        begun = time.process_time()
        done = _ask(cycle, waiting, tally)
        ended = any(isinstance(action, SnapshotEnded) for action in done)
        waiting = done
        for frame in frames:
            for one in inboxes[(event := m.decode(frame)).node].take(event):
                waiting += cycle.handle(one.node, one.body)
        tally.seconds += time.process_time() - begun
        for event in events:
            tally.note(kind_of(event), m.encode(event))
        if ended:
            return tally
    raise AssertionError("the snapshot did not end")


def encoder_bytes(shape: Shape) -> int:
    """What a rank's encoder sends for its shard: chunks, then records, tables and digests."""
    longest = max(_stripes(shape)[1], key=lambda stripe: stripe.data_bytes)
    data, parity = longest.data_members, longest.parity_members
    members, length = data + parity, longest.data_bytes
    payload = length * (members - 1) // data
    blocks = length // shape.block_bytes
    parity_blocks = parity * blocks // data
    introduction = RECORD_BYTES + DIGEST_BYTES * (blocks + parity_blocks)
    digests = (parity - 1) * DIGEST_BYTES * blocks // data
    return payload + (members - 1) * introduction + digests


def _stripes(shape: Shape) -> tuple[dict[str, str], tuple[StripeState, ...]]:
    ranks = [_place(number, shape) for number in range(shape.ranks)]
    states = new_stripes(ranks, Scheme.parse(shape.protect), shape.block_bytes)
    return {rank.shard_id: rank.node for rank in ranks}, states


def _place(number: int, shape: Shape) -> RankPlace:
    node, local = divmod(number, shape.ranks_per_node)
    name, shard = f"n{node:05d}", f"pp0-tp{local}-dp{node}-ep0"
    return RankPlace(number, shard, name, name, local, (0, local), shape.data_bytes)


def _ask(cycle: SnapshotCycle, actions: Iterable[Action], tally: Tally) -> list[Action]:
    """Encode each request, and read that its node has carried it out."""
    more: list[Action] = []
    done = m.encode(m.Ok())
    for action in actions:
        if isinstance(action, Send):
            kind = type(action.message).__name__
            tally.note(kind, m.encode(action.message))
            tally.note(f"{kind} answer", done)
            more += cycle.answered(action.node, action.message, m.decode(done))
    return more


def _events(
    actions: Iterable[Action],
    places: dict[str, str],
    tables: dict[str, tuple[SealedRecord, ...]],
    outboxes: dict[str, Outbox],
) -> list[m.NodeEvent]:
    """What SMPs tell because of these requests; one kind of them is under way at a time."""
    kinds = {type(action.message) for action in actions if isinstance(action, Send)}
    snapshot, found = SnapshotId(1, 1), list[m.NodeEvent]()
    here: dict[str, list[str]] = {}
    for shard, node in places.items():
        here.setdefault(node, []).append(shard)
    for node, shards in here.items():
        said: list[m.Message] = []
        for shard in shards:
            if m.Grant in kinds:
                said.append(m.CaptureCost(shard, snapshot, 0.01, 0.1, 1 << 30, 1.0, 0.01))
                said.append(m.Sealed(_record(shard)))
            if m.Encode in kinds:
                root, table = bytes(32), tables[shard]
                said.append(m.Encoded(snapshot, WORLD, shard, root, table, 1 << 30, 1.0))
        said += [m.OrderDone(snapshot, WORLD)] if m.Encode in kinds else []
        reports = EventBatch()
        left = [bodies for body in said if (bodies := reports.add(body, shards))]
        found += [outboxes[node].event(node, 1, bodies) for bodies in left]
    return found


def _record(shard: str) -> SealedRecord:
    return SealedRecord(
        shard_id=shard, snapshot=SnapshotId(1, 1), iteration=12, tensor_bytes=1 << 30,
        meta_offset=1 << 30, meta_bytes=4096, digest_offset=1 << 30, used_bytes=1 << 30,
        layout_hash=bytes(32), digest_root=bytes(32),
    )  # fmt: skip
