"""When two Worlds are the same: what decides their future, without names and history.

Nodes with their shards are exchangeable: each is described by itself, its own shards as
"own", and the descriptions are sorted.  Where one refers to another's shards (an arena that
lies where its shard does not live any more) they are not, and stay in their order.  Left
out are numbers that nothing compares: pids, worlds and incarnations count from the oldest that
is still referred to, iterations from the newest, and snapshots of which nothing is left
anywhere are forgotten.  Only coarse Worlds: what an SMP has decided is stored there.

``KNOWN`` lists the fields of the real machines; a test compares it with the code, so that a
new field is not forgotten here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from tests.protocol.model.encoder import Encoder
from tests.protocol.model.memory import DAMAGED, MemoryArena, MemorySlot
from tests.protocol.model.node import Node
from tests.protocol.model.processes import Loader, Process, Trainer
from tests.protocol.model.world import World

View = tuple[Any, ...]
KNOWN = {
    "NodeMachine": "node highest_incarnation shards paths sources trainers world newest effects "
    "_after",
    "ShardSlots": "shard_id slots changes pins promise made",
    "SnapshotCycle": "incarnation places nodes stripes schedule _orders phase snapshot iteration "
    "level _waiting _writing _encoders _world _broken _corrupt _last "
    "_sequence _again _passed_since _stuck stay _judge _replicas",
    "Schedule": "interval fixed first lead _before _spent _reached _refused _commits_in_a_row debt "
    "numbering",
}
"""What is described below, or decides nothing within the bounds of an exploration.

_before, _spent and _reached count only where the interval is not fixed, and in the model it is;
_passed_since and _stuck change only by the clock, which the model replaces by a step;
_writing says when it is worth while to ask for a permit, and the model asks at any time;
debt counts late iterations, of which the model's trainers report none; they number by one;
made waits for memory, which the model always has;
stay holds trainers only, and a trainer of the model may take no step at any time;
_judge and _replicas compare replicas, of which the model's trainers report none.
"""


def key(world: World) -> int:
    """The same number for the same Worlds (64 bits of a hash)."""
    return _Describer(world).key()


def memory_key(world: World) -> int:
    """The same number where a recovery would find, and should find, the same."""
    return _Describer(world).memory_key()


class _Describer:
    def __init__(self, world: World) -> None:
        self.world = world
        self.judge, self.incarnation = world.judge, world.incarnation
        self.cycle = None if self.incarnation is None else self.incarnation.cycle
        self.owner = world.places()
        self.alike = True
        self.live: set[SnapshotId] = set()
        self.newest = max(
            (p.iteration for p in world.processes.values() if isinstance(p, Trainer)), default=0
        )
        self._number_worlds()

    def _number_worlds(self) -> None:
        world, incarnation = self.world, self.incarnation
        used = {p.world for p in world.processes.values() if isinstance(p, Encoder | Loader)}
        used |= {x.machine.world for x in world.nodes.values() if x.machine is not None}
        used |= {incarnation.encoders} if incarnation is not None else set()
        used |= {self.cycle._world} if self.cycle is not None else set()
        ordered = sorted(used - {""}, key=lambda name: (name.strip("0123456789"), len(name), name))
        self.worlds = {name: number for number, name in enumerate(ordered, 1)}

    def _ahead(self, iteration: int) -> int:
        """Counted from the newest, and never negative: hash(-1) is hash(-2)."""
        return max(0, iteration - self.newest + 1000)

    def key(self) -> int:
        nodes = [self._node(node) for node in self.world.nodes.values()]
        rest = self._rest()
        judged = map(self._of_judge, self.world.nodes.values())
        views = [hash(pair) for pair in zip(nodes, judged, strict=True)]
        if self.alike:
            return hash((rest, tuple(sorted(views))))
        return hash((rest, tuple(views), tuple(self.world.active)))

    def memory_key(self) -> int:
        nodes = []
        for node in self.world.nodes.values():
            here = node.alive and node.reachable and not node.frozen
            arenas = tuple(self._arena(node, a) for a in node.arenas.values()) if here else ()
            nodes.append((here, arenas))
        rest = self._judge()
        judged = map(self._of_judge, self.world.nodes.values())
        nodes = [hash(pair) for pair in zip(nodes, judged, strict=True)]
        if self.alike:
            return hash((rest, tuple(sorted(nodes))))
        return hash((rest, tuple(nodes), tuple(self.world.active)))

    # Nodes.

    def _own(self, node: Node) -> list[str]:
        return [shard for shard, place in self.owner.items() if place == node.name]

    def _shard(self, node: Node, shard: str) -> Any:
        """An own shard by its stripe; another one by its name, and nodes are not alike then."""
        if self.owner.get(shard) == node.name:
            return self._own(node).index(shard)
        self.alike = False
        return shard

    def _node(self, node: Node) -> View:
        machine = node.machine
        inside: View = ()
        if machine is not None:
            pins = {(shard, s) for shard, x in machine.shards.items() for s in x.pins.values()}
            inside = (
                machine.highest_incarnation,
                self.worlds.get(machine.world, 0),
                tuple(sorted(map(str, (self._shard(node, s) for s in machine.trainers)))),
                tuple(sorted((str(self._shard(node, shard)), s) for shard, s in pins)),
                tuple(sorted(r.rstrip("0123456789") for r in machine.readers())),
                tuple(
                    sorted(
                        (str(self._shard(node, shard)), x.promise[0], *x.promise[2:])
                        for shard, x in machine.shards.items()
                        if x.promise is not None
                    )
                ),
            )
        restore = None if node.restore is None else node.restore.snapshot
        return (
            (node.alive, node.reachable, node.frozen, node.expired, node.late, node.highest),
            inside,
            tuple(self._arena(node, arena) for arena in node.arenas.values()),
            (node.restore is None, restore),
            tuple(
                (
                    self._incarnation(number),
                    tuple((max(-kind, 0), self._message(node, x)) for kind, x in q),
                )
                for number, q in sorted(node.requests.items())
                if q
            ),
            tuple(self._event(node, event) for event in node.events),
            tuple((p.key()[0], self.worlds.get(p.key()[1], 0)) for p in node.deaths),
            tuple(sorted((str(self._shard(node, shard)), s) for shard, s in node.told)),
            tuple(
                sorted(
                    hash(self._process(node, p))
                    for p in self.world.processes.values()
                    if p.node == node.name
                )
            ),
            self._of_incarnation(node),
        )

    def _incarnation(self, number: int) -> int:
        return self.world.incarnations - number

    def _arena(self, node: Node, arena: MemoryArena) -> View:
        permit = arena.permit
        return (
            self._shard(node, arena.shard),
            arena.incarnation,
            arena.lineage,
            None if permit is None else (permit.snapshot, permit.slot, permit.revoked),
            None if permit is None else self._ahead(permit.iteration),
            tuple(self._slot(arena, slot) for slot in arena.slots),
        )

    def _slot(self, arena: MemoryArena, slot: MemorySlot) -> View:
        header = slot.header
        if header.snapshot is not None:
            self.live.add(header.snapshot)
        return (
            int(header.state),
            header.snapshot,
            header.iteration == -1,
            header.local_only,
            header.record is None,
            header.parity_valid,
            len(header.stripe_table),
            tuple(self._tag(arena, tag) for tag in slot.data),
            tuple(self._tags(arena, tags) for tags in slot.parity),
        )

    def _tag(self, arena: MemoryArena, tag: Any) -> Any:
        if tag is None or tag is DAMAGED:
            return tag
        self.live.add(tag[0])
        if tag[1] == arena.shard:
            return tag[0]
        self.alike = False
        return tag

    def _tags(self, arena: MemoryArena, tags: frozenset[Any]) -> Any:
        snapshots = {snapshot for snapshot, _ in tags}
        self.live |= snapshots
        if not tags:
            return None
        if len(snapshots) == 1 and len(tags) == len(arena.stripe.members):
            return next(iter(snapshots))
        self.alike = False
        return tags

    def _process(self, node: Node, p: Process) -> View:
        common = (p.alive, p.suspended, p.doomed, p.joined)
        said = tuple(self._message(node, message) for message in p.outbox)
        if isinstance(p, Trainer):
            return ("trainer", common, said, *self._trainer(node, p))
        if isinstance(p, Encoder):
            return ("encoder", common, said, *self._encoder(node, p))
        assert isinstance(p, Loader)
        target = None if p.target is None else self._place(node, p.target)
        left = tuple(self._shard(node, shard) for shard in p.left)
        return (
            "loader",
            common,
            said,
            self.worlds[p.world],
            p.snapshot,
            left,
            target,
            p.part,
            p.stored,
        )

    def _trainer(self, node: Node, p: Trainer) -> View:
        arena: Any = None
        if p.arena is not None:
            here = node.arenas.get(p.shard) is p.arena
            arena = "here" if here else self._arena(node, p.arena)
        run = None if p.run is None else (p.run.snapshot, p.run.slot)
        age = self.world.newest_incarnation - p.incarnation
        ahead = self._ahead(p.iteration)
        begun = p.copied, p.given, p.released
        return self._shard(node, p.shard), age, ahead, arena, p.last_permit, run, *begun

    def _encoder(self, node: Node, p: Encoder) -> View:
        order: View = ()
        if p.order is not None:
            member = p.order.stripes[p.number].world_ranks.index(p.rank) if self._at_work(p) else 0
            order = (
                self._message(node, p.order),
                p.number,
                p.stage,
                self._buffer(p.buffer),
                tuple(
                    (
                        at[0],
                        at[1].__name__,
                        at[2],
                        self._view_of(node, session, member),
                        member in session.finished,
                    )
                    for at, session in p.mpi.sessions.items()
                    if at[0] == p.taken
                ),
            )
        inbox = tuple(self._message(node, message) for message in p.inbox)
        alone = not self.alike and p.rank
        return self.worlds.get(p.world, 0), p.mpi.broken, inbox, p.taken, order, alone

    @staticmethod
    def _at_work(p: Encoder) -> bool:
        return p.order is not None and p.number < len(p.order.stripes)

    def _view_of(self, node: Node, session: Any, member: int) -> Any:
        view = session.views.get(member)
        table = len(session.tables.get(member, ()))
        return None if view is None else (self._place(node, view), table)

    def _place(self, node: Node, slot: MemorySlot) -> Any:
        """Which slot of the node this is; one of an arena that is gone by its content."""
        for shard, arena in node.arenas.items():
            for index, one in enumerate(arena.slots):
                if one is slot:
                    return self._shard(node, shard), index
        return "gone", int(slot.header.state), slot.header.snapshot, slot.data

    @staticmethod
    def _buffer(buffer: Any) -> Any:
        if isinstance(buffer, dict):
            return len(buffer)
        if isinstance(buffer, tuple):
            return buffer[0][0]
        return None if buffer is None else max(snapshot for snapshot, _ in buffer)

    # Messages.

    def _event(self, node: Node, event: tuple[Any, ...]) -> View:
        if event[0] == "event":
            return "event", event[1], self._message(node, event[2])
        _, incarnation, number, (request, answer) = event
        first = 0
        if number >= 0 and self.incarnation is not None:
            first = self.incarnation.asked - len(self.incarnation.questions)
        error = type(answer.error if isinstance(answer, m.Refused) else answer).__name__
        return (
            "answer",
            self._incarnation(incarnation),
            number < first,
            self._message(node, request),
            error,
        )

    def _message(self, node: Node, message: Any) -> View:
        get = lambda name: getattr(message, name, None)  # noqa: E731
        record = get("record")
        shard = get("shard_id") or (record.shard_id if record is not None else None)
        snapshot = get("snapshot") or (record.snapshot if record is not None else None)
        if shard is not None:
            shard = self._shard(node, shard)
        return (
            type(message).__name__,
            snapshot,
            shard,
            get("incarnation"),
            self.worlds.get(get("world") or "", 0),
            get("level") or get("role") or get("corrupt"),
            self.worlds.get(get("who") or "", 0),
            self._lost(node, get("stripes") or ()),
            isinstance(message, m.Admit) and message.survivors != (),
        )

    def _lost(self, node: Node, stripes: Iterable[m.StripeOrder]) -> View:
        lost = [shard for stripe in stripes for shard in stripe.lost]
        return len(lost), tuple(shard for shard in self._own(node) if shard in lost) != ()

    # What the coordinator and the judge know of a node.

    def _of_incarnation(self, node: Node) -> View:
        incarnation, cycle, own = self.incarnation, self.cycle, self._own(node)
        known = tuple(sorted((own.index(s), at) for s, at in self.world.known_bad if s in own))
        reading = tuple(
            (r.snapshot, len(r.read), r.pinned_by == node.pins_hold)
            for r in self.world.readers.values()
            if r.node == node.name
        )
        if incarnation is None:
            return known, reading
        questions = tuple(
            (type(q.request).__name__, None if q.answer is None else type(q.answer).__name__)
            for q in incarnation.questions
            if q.node == node.name
        )
        names: View = ()
        if cycle is not None:
            names = (
                node.name in cycle._waiting,
                tuple(shard in cycle._waiting for shard in own),
                node.name in cycle._encoders,
            )
        drain: View = ()
        if incarnation.drain is not None:
            drain = (
                node.name in incarnation.drain.nodes,
                tuple((s in incarnation.drain.files, s in incarnation.drain.readers) for s in own),
            )
        return (
            (known, reading, questions, names, drain),
            node.name in self.world.active,
            node.name in incarnation.up,
            tuple(
                (
                    s in incarnation.hellos,
                    s in incarnation.rebuilt,
                    s in incarnation.targets,
                    incarnation.places.get(s) == node.name,
                )
                for s in own
            ),
        )

    def _of_judge(self, node: Node) -> View:
        judge = self.judge
        return tuple(
            (
                s in judge.lost,
                s in judge.hurt,
                tuple(
                    at for at in sorted(judge.sealed) if at in self.live and s in judge.sealed[at]
                ),
            )
            for s in self._own(node)
        )

    # The rest.

    def _rest(self) -> View:
        world = self.world
        return (
            (
                world.newest_incarnation,
                world.judge.noted,
                world.over,
                world.newest,
                world.disk_away,
                world.knows_trainers,
            ),
            (world.drains_begun, world.readers_seen),
            tuple((one.snapshot, one.lineage) for one in world.disk),
            tuple((one.snapshot, one.lineage, one.stage) for one in world.orphans),
            self._incarnation_view(),
            self._judge(),
        )

    def _incarnation_view(self) -> View:
        incarnation, cycle = self.incarnation, self.cycle
        if incarnation is None:
            return ()
        decision = incarnation.decision
        inside: View = ()
        if cycle is not None:
            self.live.add(cycle.snapshot)
            inside = (
                cycle.phase.value,
                cycle.snapshot,
                self._ahead(cycle.iteration),
                cycle.level,
                cycle.schedule.lead,
                self._ahead(cycle.schedule._refused),
                self.worlds.get(cycle._world, 0),
                bool(cycle._broken),
                bool(cycle._corrupt),
                cycle._last,
                cycle._sequence,
                cycle._again,
            )
        drain = incarnation.drain
        return (
            (
                incarnation.incarnation,
                incarnation.stage,
                incarnation.awaits,
                incarnation.failed,
                incarnation.refused,
            ),
            None if decision is None else (decision.snapshot, decision.protected),
            incarnation.lineage,
            None if incarnation.source is None else incarnation.source.snapshot,
            (
                incarnation.fresh,
                bool(incarnation.decided),
                self.worlds.get(incarnation.encoders, 0),
            ),
            inside,
            None if drain is None else (drain.snapshot, drain.stage, drain.waiting, drain.failed),
        )

    def _judge(self) -> View:
        judge, world = self.judge, self.world
        live = self.live | {one.snapshot for one in world.disk} | {world.newest}
        live |= {judge.floor, judge.local_floor, judge.durable}
        if self.incarnation is not None and self.incarnation.decision is not None:
            live.add(self.incarnation.decision.snapshot)
        return (
            (judge.floor, judge.local_floor, judge.durable, judge.registered, judge.noted),
            frozenset(judge.valid & live),
            frozenset(judge.aborted & live),
            frozenset(judge.protected & live),
            frozenset(judge.everywhere & live),
            frozenset(judge.given_up & live),
        )
