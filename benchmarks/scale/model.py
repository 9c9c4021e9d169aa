"""One snapshot of a job of any size, driven through the coordinator's own state machine.

Nothing is started: ``SnapshotCycle`` decides as it does in a job, nodes answer at once, and
every message is encoded as it is on the wire.  What encoders send is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.scale.tally import Tally, kind_of, told
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.coordinator.actions import Action, Ended, Send
from megatron_ft.coordinator.cycle import SnapshotCycle
from megatron_ft.coordinator.plan import Sizes, stripe_orders
from megatron_ft.coordinator.registration import new_stripes
from megatron_ft.coordinator.relays import FAN_OUT, PATIENCE_SECONDS
from megatron_ft.coordinator.schedule import Schedule
from megatron_ft.coordinator.tree import Branch, answers, branches, wrapped
from megatron_ft.erasure.scheme import Scheme
from megatron_ft.erasure.stripes import RankPlace
from megatron_ft.identity import SealedRecord, SnapshotId
from megatron_ft.recovery.decide import StripeState
from megatron_ft.smp import messages as m
from megatron_ft.smp.gathering import Gathering
from megatron_ft.smp.outbox import Outbox
from megatron_ft.smp.reports import Reports

WORLD = "w1"
ROUNDS, REPORTS = 3, 2
"""Of a snapshot: permit, encode and commit; sealed and encoded."""

DIGEST_BYTES, RECORD_BYTES = 8, 250
"""Of a block, and of what a member says of itself besides; the latter is about right."""


@dataclass(frozen=True)
class Shape:
    """A job: ``data_bytes`` is a shard's length in the arena.

    With more nodes than ``fan_out`` requests are passed on by so many of them.
    """

    nodes: int
    ranks_per_node: int
    protect: str
    data_bytes: int
    block_bytes: int = BLOCK_BYTES
    fan_out: int = FAN_OUT

    @property
    def ranks(self) -> int:
        """All trainers."""
        return self.nodes * self.ranks_per_node

    def tree(self, nodes: Sequence[str]) -> tuple[Branch, ...]:
        """Who passes requests on, as the coordinator has it."""
        fan_out = self.fan_out if len(nodes) > self.fan_out else len(nodes)
        return branches(nodes, fan_out)


def control_messages(shape: Shape) -> Tally:
    """All that the coordinator sends and reads from permit to commit."""
    places, stripes = _stripes(shape)
    nodes = sorted(set(places.values()))
    orders = stripe_orders(stripes, places, nodes)
    cycle, tally = SnapshotCycle(1, places, orders, Schedule(1)), Tally()
    tables = {s: tuple(map(_record, st.members)) for st in stripes for s in st.members}
    waiting: list[Action] = list(cycle.propose(10, WORLD))
    while waiting:
        done = _answer(cycle, waiting, tally, shape)
        if isinstance(waiting[-1], Ended):
            return tally
        events = _events(waiting, places, tables)
        waiting = done
        for report in _gathered(events, shape):
            tally.note(kind_of(report), report)
            for one in told(report):
                waiting += cycle.handle(one.node, one.body)
    raise AssertionError("the snapshot did not end")


def depth(shape: Shape) -> int:
    """Connections between the coordinator and the farthest node."""
    return max(branch.depth() for branch in shape.tree(_names(shape)))


def relay_messages(shape: Shape) -> int:
    """All that the busiest SMP sends and reads for a snapshot: three rounds and two reports."""

    def most_below(tree: Sequence[Branch]) -> int:
        return max((max(len(b.below), most_below(b.below)) for b in tree), default=0)

    below = most_below(shape.tree(_names(shape)))
    return ROUNDS * (2 + 2 * below) + REPORTS * (1 + below)


def _names(shape: Shape) -> list[str]:
    return [f"n{node:05d}" for node in range(shape.nodes)]


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
    states = new_stripes(ranks, Scheme.parse(shape.protect), Sizes(shape.block_bytes))
    return {rank.shard_id: rank.node for rank in ranks}, states


def _place(number: int, shape: Shape) -> RankPlace:
    node, local = divmod(number, shape.ranks_per_node)
    name, shard = f"n{node:05d}", f"pp0-tp{local}-dp{node}-ep0"
    return RankPlace(number, shard, name, name, local, (0, local), shape.data_bytes)


def _answer(
    cycle: SnapshotCycle, actions: Iterable[Action], tally: Tally, shape: Shape
) -> list[Action]:
    more: list[Action] = []
    sends = {action.node: action.message for action in actions if isinstance(action, Send)}
    endpoints = {node: f"tcp://10.0.{n >> 8}.{n & 255}:40000" for n, node in enumerate(sends)}
    for branch in shape.tree(list(sends)):
        kind = type(sends[branch.node]).__name__
        request: m.Message
        if branch.below:
            request = wrapped(branch, 1, sends, endpoints, PATIENCE_SECONDS)
            passed = m.decode(m.encode(m.Passed(branch.nodes(), {})))
        else:
            request, passed = sends[branch.node], m.Ok()
        tally.note(kind, request)
        tally.note(f"{kind} answer", passed)
        for node, answer in (answers(passed) if branch.below else {branch.node: passed}).items():
            more += cycle.answered(node, sends[node], answer)
    return more


def _events(
    actions: Iterable[Action],
    places: dict[str, str],
    tables: dict[str, tuple[SealedRecord, ...]],
) -> list[m.Event]:
    """What nodes say because of these requests; one kind of them is under way at a time."""
    kinds = {type(action.message) for action in actions if isinstance(action, Send)}
    snapshot, found = SnapshotId(1, 1), list[m.Event]()
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
        found += _reports(node, said, shards)
    return found


def _reports(node: str, said: list[m.Message], shards: list[str]) -> list[m.Event]:
    """The messages in which an SMP tells this."""
    reports, outbox = Reports(), Outbox(1 << 31)
    left = [bodies for body in said if (bodies := reports.tell(body, shards))]
    return [outbox.relayed(node, 1, bodies) for bodies in left]


def _gathered(events: Sequence[m.Event], shape: Shape) -> list[m.Event | m.Gathered]:
    """How reports of one round, which all come in time, arrive at the coordinator."""
    by_node = {event.node: event for event in events}
    arriving: list[m.Event | m.Gathered] = []
    for branch in shape.tree(list(by_node)):
        arriving.append(_of_branch(branch, by_node) if branch.below else by_node[branch.node])
    return arriving


def _of_branch(branch: Branch, by_node: dict[str, m.Event]) -> m.Gathered:
    """What a relay sends, or a node below one."""
    snapshot, gathering = SnapshotId(1, 1), Gathering()
    gathering.begin(snapshot, b"above", {branch.node, *(below.node for below in branch.below)})
    frame = m.encode(by_node[branch.node])
    gathering.add(m.Gathered(1, branch.node, snapshot, True, (frame,)))
    for below in branch.below:
        gathering.add(_of_branch(below, by_node))
    gathered = gathering.take(branch.node, 1)
    assert gathered is not None and gathered.whole
    return gathered


def _record(shard: str) -> SealedRecord:
    return SealedRecord(
        shard_id=shard, snapshot=SnapshotId(1, 1), iteration=12, tensor_bytes=1 << 30,
        meta_offset=1 << 30, meta_bytes=4096, digest_offset=1 << 30, used_bytes=1 << 30,
        layout_hash=bytes(32), digest_root=bytes(32),
    )  # fmt: skip
