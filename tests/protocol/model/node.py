"""A machine of the modelled cluster, and its SMP: what smp/service.py and the servers do."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.arena.format import SlotState
from megatron_ft.core.errors import StaleIncarnationError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import EventBatch, EventSubscription, Outbox
from megatron_ft.smp import state_machine as e
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine
from tests.protocol.model.judge import Violation
from tests.protocol.model.memory import DAMAGED, MemoryArena, MemorySlot
from tests.protocol.model.processes import Loader, Process, Trainer

CYCLE, DRAIN, REPEATED = -1, -2, -3
"""Whose request it is, where it is not one of a recovery's, which are numbered from 0."""


@dataclass
class Node:
    """Its arenas, its SMP (``machine``), and what is under way.

    ``frozen``: the SMP is suspended.  ``expired``: the coordinator's lease has run out, ``late``
    if the SMP has not acted upon it because it was suspended.
    ``generation`` counts its SMPs.  ``requests`` are those of each incarnation, ``events`` what is
    on its way to a coordinator, ``told`` the damage that the scrub has reported.  ``repeats`` are
    requests that come once more, ``late_answers`` those to them, both in any order.  ``inbox`` is
    the coordinator's.
    """

    name: str
    alive: bool = True
    reachable: bool = True
    frozen: bool = False
    expired: bool = False
    late: bool = False
    highest: int = 0
    generation: int = 0
    arenas: dict[str, MemoryArena] = field(default_factory=dict)
    machine: NodeMachine | None = None
    writers: list[Process] = field(default_factory=list)
    deaths: list[Process] = field(default_factory=list)
    batch: deque[Any] = field(default_factory=deque)
    answers: list[Any] = field(default_factory=list)
    restore: m.RestoreReady | None = None
    requests: dict[int, deque[Any]] = field(default_factory=dict)
    events: deque[Any] = field(default_factory=deque)
    told: set[Any] = field(default_factory=set)
    repeats: list[Any] = field(default_factory=list)
    late_answers: list[Any] = field(default_factory=list)
    reports: EventBatch = field(default_factory=EventBatch)
    outbox: Outbox = field(default_factory=Outbox)
    inbox: EventSubscription = field(default_factory=EventSubscription)

    @property
    def pins_hold(self) -> tuple[Any, ...]:
        """For as long as this stays, a pin holds: neither Admit nor Adopt asks for any."""
        incarnations = tuple(arena.incarnation for arena in self.arenas.values())
        return self.generation, self.machine and self.machine.highest_incarnation, incarnations

    @property
    def up(self) -> bool:
        return self.alive and self.machine is not None

    @property
    def answering(self) -> bool:
        """Whether a coordinator hears of it."""
        return self.up and self.reachable and not self.frozen

    @property
    def working(self) -> bool:
        """Whether its SMP takes steps."""
        return self.up and not self.frozen


class SmpSteps:
    """What the SMPs of a World do; mixed into it."""

    # Its incarnation.

    def _do_smp_crash(self, name: str, losing: bool) -> None:
        """The SMP dies; what was sent to it is lost too, or reaches the next one."""
        node = self.nodes[name]
        self._stop_smp(node)
        for process in self._on(name):
            if losing and process.joined:
                process.outbox.clear()
            if not isinstance(process, Trainer) and not process.suspended:
                process.doomed = True

    def _stop_smp(self, node: Node) -> None:
        node.machine, node.restore, node.frozen = None, None, False
        node.batch = deque()
        node.answers = []
        node.requests = {}
        node.repeats = []
        node.told.clear()

    def _do_smp_crash_in(self, name: str, effects: int, step: tuple[Any, ...]) -> None:
        """The SMP takes one more step and dies after some of its effects."""
        self.flushing = False
        getattr(self, f"_do_{step[0]}")(*step[1:])
        self.flushing = True
        if self.nodes[name].machine is not None:
            for _ in range(effects):
                self._do_effect(name)
            self._do_smp_crash(name, False)

    def _do_smp_start(self, name: str) -> None:
        self.start_smp(name)
        incarnation = self.incarnation
        if incarnation is not None and incarnation.cycle is not None:
            incarnation.carry_out(self, incarnation.cycle.smp_restarted(name))
        elif incarnation is not None:
            incarnation.failed = True

    def start_smp(self, name: str) -> None:
        """A new SMP from what is in memory: stored headers, the list of writers."""
        node = self.nodes[name]
        if node.machine is not None:
            return
        node.generation += 1
        node.expired = node.late = False
        node.machine, node.inbox = NodeMachine(name, node.highest), EventSubscription()
        self._begin_stream(node)
        for arena in node.arenas.values():
            self._enter_arena(node, arena)
        gone, node.deaths = node.deaths, []
        for process in node.writers + gone:
            self._enter(node, process)
        for process in gone:
            self._leave(node, process)
        node.machine.adopted()

    def _enter(self, node: Node, process: Process) -> None:
        role, who = process.key()
        if role == "trainer":
            node.machine.trainer_joined(who)
        else:
            node.machine.encoder_joined(who)

    def _leave(self, node: Node, process: Process) -> None:
        role, who = process.key()
        if role == "trainer":
            node.machine.trainer_gone(who, process.pid)
        else:
            node.machine.encoder_gone(who, process.pid)

    def _do_reap(self, name: str) -> None:
        node = self.nodes[name]
        self._leave(node, node.deaths.pop(0))

    def _do_expire(self, name: str) -> None:
        """The lease has run out: an SMP that can kills its own writers."""
        node = self.nodes[name]
        node.expired = True
        if node.working:
            self.obey_lease(node)

    def obey_lease(self, node: Node) -> None:
        for process in self._on(node.name):
            waits = isinstance(process, Trainer) and process.released
            if process in node.writers or waits:
                self.kill(process)

    def _do_enforce(self, name: str) -> None:
        """An SMP that was suspended finds that its lease has run out."""
        node = self.nodes[name]
        node.late = False
        node.expired = not node.reachable
        self.obey_lease(node)

    # What its processes say.

    def _do_local(self, pid: int) -> None:
        process = self.processes[pid]
        node = self.nodes[process.node]
        message = process.outbox.pop(0)
        if isinstance(message, m.Hello | m.EncoderHello):
            if process.alive:
                self._hello(node, process, message)
        elif isinstance(message, m.CorruptShard):
            self._tell(node, node.highest, message)
        else:
            answer = node.machine.handle(message)
            if isinstance(process, Loader) and isinstance(answer, m.Ok):
                self._do_flush(node.name)  # it is answered when that is stored
                process.stored += 1

    def _hello(self, node: Node, process: Process, message: Any) -> None:
        if getattr(message, "incarnation", node.highest) != node.highest:
            process.doomed = True
            return
        role, who = process.key()
        for rival in list(node.writers):
            same = rival.key()[0] == role and (role == "encoder" or rival.key()[1] == who)
            if same:
                self.evict(node, rival)
        while node.deaths:
            self._leave(node, node.deaths.pop(0))
        node.writers.append(process)
        process.joined = True
        self._enter(node, process)
        self._tell(node, node.highest, message)
        if isinstance(process, Trainer):
            self._load(node, process)

    def evict(self, node: Node, rival: Process) -> None:
        """Rule 7: a writer is registered only after its rivals are dead."""
        self.kill(rival)

    def _load(self, node: Node, trainer: Trainer) -> None:
        """The trainer restores from its slot: it must be there, and its bytes right."""
        ready = node.restore
        if ready is None or ready.snapshot is None:
            return
        slots = node.machine.shards.get(trainer.shard)
        index = None if slots is None else slots.find(ready.snapshot)
        if index is None:
            raise Violation(f"{trainer.shard} starts from nothing, others from {ready.snapshot}")
        data = node.arenas[trainer.shard].slots[index].data
        if DAMAGED in data:
            body = m.CorruptShard(trainer.shard, ready.snapshot, 1)
            trainer.outbox.append(body)
        elif set(data) != {(ready.snapshot, trainer.shard)}:
            raise Violation(f"{trainer.shard} loads {data} as {ready.snapshot}")
        trainer.iteration = self.judge.iterations[ready.snapshot]

    # Effects.

    def _do_flush(self, name: str) -> None:
        node = self.nodes[name]
        self._do_effect(name)
        while node.batch:
            self._do_effect(name)

    def _do_effect(self, name: str) -> None:
        """Carry one effect out; answers leave after everything that came before them."""
        node = self.nodes[name]
        if not node.batch:
            node.batch.extend(node.machine.take_effects())
            node.batch.extend(node.answers)
            node.answers.clear()
        if node.batch:
            self._carry_out(node, node.batch.popleft())

    def _carry_out(self, node: Node, effect: Any) -> None:
        if isinstance(effect, e.StoreSlot):
            slot = node.arenas[effect.shard_id].slots[effect.slot]
            old, slot.header = slot.header, effect.header
            self.note_store(effect.shard_id, old, effect.header)
        elif isinstance(effect, e.StorePermit):
            node.arenas[effect.shard_id].permit = effect.permit
        elif isinstance(effect, e.ToCoordinator):
            self._tell(node, node.machine.highest_incarnation, effect.body)
        elif isinstance(effect, e.ToEncoder):
            for encoder in self._encoders(node.machine.world):
                if encoder.node == node.name:
                    encoder.inbox.append(effect.body)
        elif isinstance(effect, tuple):
            self._answer(node, effect)

    def _tell(self, node: Node, incarnation: int, body: Any) -> None:
        if self.shape.resets:
            self._report(node, incarnation, node.reports.add(body, node.machine.shards))
        elif not (self.shape.coarse and isinstance(body, m.OrderDone | m.SlotFreed)):
            node.events.append(("event", incarnation, body))

    def _report(self, node: Node, incarnation: int, bodies: list[Any]) -> None:
        """EventPublisher._leave."""
        if bodies:
            node.events.append(("report", node.outbox.event(node.name, incarnation, bodies)))

    def _begin_stream(self, node: Node) -> None:
        self.streams += 1
        node.reports, node.outbox = EventBatch(), Outbox(self.streams)

    def _do_look(self, name: str) -> None:
        """What has waited for other ranks' words for long leaves without them."""
        node = self.nodes[name]
        self._report(node, node.highest, node.reports.flush())

    def _do_unheard(self, name: str) -> None:
        """What should have arrived by now is sent once more."""
        node = self.nodes[name]
        node.events.append(("report", node.outbox.again(name, node.highest)))

    def _do_heard(self, name: str) -> None:
        """A heartbeat says what has arrived."""
        node = self.nodes[name]
        node.outbox.arrived(node.inbox.stream, node.inbox.number)

    def _answer(self, node: Node, effect: tuple[Any, ...]) -> None:
        incarnation, number, (request, answer) = effect
        if number == REPEATED:
            node.late_answers.append((incarnation, CYCLE, (request, answer)))
            return
        nothing = number == -1 and isinstance(request, m.Grant | m.Encode)
        if not (self.shape.coarse and nothing and isinstance(answer, m.Ok)):
            node.events.append(("answer", incarnation, number, (request, answer)))
            if self.shape.coarse and len(node.events) == 1 and node.reachable:
                self._do_event(node.name)

    def _do_scrub(self, name: str, shard: str, index: int) -> None:
        """The SMP reads a committed slot again and finds what has gone bad."""
        node = self.nodes[name]
        slot = node.arenas[shard].slots[index]
        node.told.add((shard, slot.header.snapshot))
        body = m.BadBlocks(shard, slot.header.snapshot, slot.data.count(DAMAGED))
        self._tell(node, node.machine.highest_incarnation, body)

    # Requests of coordinators: smp/control_server.py.

    def _do_request(self, name: str, incarnation: int) -> None:
        node = self.nodes[name]
        number, request = node.requests[incarnation].popleft()
        answer = self._serve(node, request)
        node.answers.append((incarnation, number, (request, answer)))

    def _do_repeat(self, name: str, index: int) -> None:
        """A request comes from an older connection, maybe long after it was answered."""
        node = self.nodes[name]
        incarnation, request = node.repeats.pop(index)
        node.answers.append((incarnation, REPEATED, (request, self._serve(node, request))))

    def _do_reset(self, name: str) -> None:
        """The connection is made anew: what the node has told is lost."""
        node = self.nodes[name]
        node.repeats.clear()
        node.late_answers.clear()
        node.events = deque(event for event in node.events if event[0] != "report")

    def _serve(self, node: Node, request: Any) -> m.Message:
        if isinstance(request, m.Admit):
            return self._admit(node, request)
        answer = self._obey(node, request)
        if request.incarnation < node.highest and not isinstance(answer, m.Refused):
            raise Violation(
                f"{node.name} obeys incarnation {request.incarnation} after a newer one"
            )
        return answer

    def _obey(self, node: Node, request: Any) -> m.Message:
        if self.stale(node, request):
            return m.Refused(StaleIncarnationError(""))
        if isinstance(request, m.CreateArena):
            self._create(node, request)
        elif isinstance(request, m.RestoreReady):
            node.restore = request
        else:
            if isinstance(request, m.Adopt):
                self._adopt(node, request)
            return node.machine.handle(request)
        return m.Ok()

    def stale(self, node: Node, request: Any) -> bool:
        """Whether a request is of another incarnation than the one that was admitted."""
        return request.incarnation != node.machine.highest_incarnation

    def _admit(self, node: Node, request: m.Admit) -> m.Message:
        if request.incarnation <= node.machine.highest_incarnation:
            return m.Refused(StaleIncarnationError(""))
        node.highest = request.incarnation
        self.fence(node, request.survivors)
        node.restore = None
        node.expired = node.late = False
        node.machine.admit(request.incarnation)
        self._begin_stream(node)
        if self.shape.coarse:
            self._drop_older(node)
        arenas = [
            arena.report(node.machine.shards[arena.shard].slots) for arena in node.arenas.values()
        ]
        return m.Inventory(node.name, 0, tuple(arenas))

    def _drop_older(self, node: Node) -> None:
        """Requests that would be refused from now on, unheard by anybody."""
        for incarnation, queue in list(node.requests.items()):
            left = [pair for pair in queue if pair[1].incarnation >= node.highest]
            if incarnation == self.incarnations:
                continue
            if left:
                node.requests[incarnation] = type(queue)(left)
            else:
                del node.requests[incarnation]

    def fence(self, node: Node, keep: tuple[int, ...]) -> None:
        """Rule 7: no registered writer can write any more when the new incarnation is let in."""
        for process in self._on(node.name):
            survives = isinstance(process, Trainer) and self._survives(process, keep)
            if process in node.writers and survives:
                node.writers.remove(process)
                self._leave(node, process)
                process.released, process.joined, process.iteration = True, False, 0
            elif process in node.writers or (
                isinstance(process, Trainer) and process.released and not survives
            ):
                self.kill(process)
        while node.deaths:
            self._leave(node, node.deaths.pop(0))

    def _survives(self, trainer: Trainer, keep: tuple[int, ...]) -> bool:
        """smp/survivors.py: it is to be kept, answers, and the proof holds."""
        rank = list(self.places()).index(trainer.shard)
        return rank in keep and trainer.let_go() and self.proven(trainer)

    def proven(self, trainer: Trainer) -> bool:
        """Whether the SMP finds no arena among the mappings of a trainer that has answered."""
        return trainer.arena is None

    def _create(self, node: Node, request: m.CreateArena) -> None:
        if request.shard_id in node.arenas:
            return
        stripe = next(s for s in self.stripes if s.members == request.members)
        slots = [MemorySlot.of(self.shape.halves) for _ in range(request.slot_count)]
        arena = MemoryArena(request.shard_id, stripe, request.incarnation, request.lineage, slots)
        node.arenas[request.shard_id] = arena
        self._enter_arena(node, arena)

    def _enter_arena(self, node: Node, arena: MemoryArena) -> None:
        node.machine.shards[arena.shard] = ShardSlots(arena.shard, arena.headers())
        node.machine.paths[arena.shard] = ""

    def _adopt(self, node: Node, request: m.Adopt) -> None:
        """Remove shards that moved to other nodes; the rest joins the new incarnation."""
        self._do_flush(node.name)
        for shard in node.arenas.keys() - set(request.keep):
            del node.arenas[shard], node.machine.shards[shard], node.machine.paths[shard]
        for arena in node.arenas.values():
            arena.incarnation, arena.lineage = request.incarnation, request.lineage
        self.changed = True

    def damaged_slots(self, node: Node) -> list[tuple[str, int]]:
        """Committed slots with bad blocks that the scrub has not reported yet."""
        return [
            (arena.shard, index)
            for arena in node.arenas.values()
            for index, slot in enumerate(arena.slots)
            if slot.header.state == SlotState.COMMITTED
            and DAMAGED in slot.data
            and (arena.shard, slot.header.snapshot) not in node.told
        ]
