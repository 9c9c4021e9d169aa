"""A whole job as a model: the real machines, and around them a world that can go wrong.

NodeMachine, ShardSlots, SnapshotCycle, decide, the lineage and plan.py are the real ones.
Modelled are what carries out their decisions (the SMP's servers, the supervisor, MPI) and
everything that can happen between two steps.  ``World.enabled`` lists the steps that are
possible, ``World.perform`` takes one.  Nothing is random here: a run is its list of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol_memory import Judge, MemoryArena, MemorySlot, Violation
from protocol_processes import Encoder, Process, Reader, Trainer

from megatron_ft.arena.format import SlotState
from megatron_ft.coordinator import cycle as c
from megatron_ft.coordinator.cycle import Phase, SnapshotCycle
from megatron_ft.coordinator.plan import Sizes, create_requests, stripe_orders
from megatron_ft.identity import SnapshotId
from megatron_ft.recovery.decide import Decision, StripeState
from megatron_ft.recovery.lineage import extend
from megatron_ft.smp import effects as e
from megatron_ft.smp import messages as m
from megatron_ft.smp.node import NodeMachine
from megatron_ft.smp.slots import ShardSlots

Step = tuple[Any, ...]
"""Name of a step and its arguments: pids, node names, numbers of lives."""
MOST_DRIFT = 2


@dataclass(frozen=True)
class Shape:
    """A small job: ``stripes`` of ``data`` + ``parity`` members, one of each on every node."""

    codec: str
    data: int
    parity: int
    spares: int
    slots: int
    stripes: int = 1
    readers: bool = False

    def nodes(self) -> list[str]:
        return [f"n{i}" for i in range(self.data + self.parity)]

    def stripe_states(self) -> tuple[StripeState, ...]:
        count = self.data + self.parity
        return tuple(
            StripeState(
                self.codec,
                self.data,
                self.parity,
                64 * self.data,
                tuple(f"dp{s * count + i}" for i in range(count)),
            )
            for s in range(self.stripes)
        )


@dataclass
class Node:
    """A machine of the cluster: its arenas, its SMP (``machine``), and what is under way."""

    name: str
    alive: bool = True
    reachable: bool = True
    highest: int = 0
    arenas: dict[str, MemoryArena] = field(default_factory=dict)
    machine: NodeMachine | None = None
    writers: list[Process] = field(default_factory=list)
    deaths: list[Process] = field(default_factory=list)
    batch: deque[Any] = field(default_factory=deque)
    answers: list[Any] = field(default_factory=list)
    restore: m.RestoreReady | None = None
    requests: dict[int, deque[m.Message]] = field(default_factory=dict)
    events: deque[tuple[str, int, Any]] = field(default_factory=deque)

    @property
    def up(self) -> bool:
        return self.alive and self.machine is not None


class LifeFailed(Exception):
    """This life cannot go on; the supervisor starts another."""


class Life:
    """One incarnation of the job, as the supervisor leads it; ``script`` waits by yielding."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.incarnation = world, number, world.incarnation + 1
        self.places: dict[str, str] = {}
        self.pending: dict[tuple[str, int], list[Any]] = {}
        self.cycle: SnapshotCycle | None = None
        self.failed = False
        self.encoders = ""
        self.up: set[str] = set()
        self.hellos: set[str] = set()
        self.rebuilt: set[str] = set()
        self.waits: Callable[[], bool] = lambda: True
        self.script = self._run()

    def resume(self) -> None:
        """Go on as far as possible."""
        while not self.failed and self.waits():
            try:
                self.waits = next(self.script)
            except StopIteration:
                self.waits = lambda: False
            except LifeFailed:
                self.failed = True

    def usable_world(self) -> str:
        return self.encoders if self.up >= set(self.world.active) else ""

    # Recovery: coordinator/recovery.py and launch/supervisor.py, step by step.

    def _ask(self, requests: Mapping[str, m.Message]) -> Iterator[Callable[[], bool]]:
        keys = [(node, id(request)) for node, request in requests.items()]
        for node, request in requests.items():
            self.pending[node, id(request)] = [request, None]
            self.world.send(self, node, request)
        yield lambda: all(self.pending[key][1] is not None for key in keys)

    def _answer(self, node: str, request: m.Message) -> Any:
        return self.pending[node, id(request)][1]

    def _demand(self, requests: Mapping[str, m.Message]) -> Iterator[Callable[[], bool]]:
        yield from self._ask(requests)
        if any(isinstance(self._answer(*key), m.Refused) for key in requests.items()):
            raise LifeFailed

    def _run(self) -> Iterator[Callable[[], bool]]:
        world = self.world
        inventories = yield from self._admit()
        world.replace_lost(set(inventories))
        world.incarnation = self.incarnation
        self.places = world.places()
        decision = world.judge_now(inventories)
        arenas = [holding.arena for holding in decision.holdings.values()]
        newest = max(arenas, key=lambda arena: arena.incarnation, default=None)
        older = () if newest is None else newest.lineage
        lineage = extend(older, self.incarnation, decision.snapshot)
        kept = self.places if decision.snapshot is not None else {}
        yield from self._demand(
            {
                name: m.Adopt(
                    self.incarnation,
                    lineage,
                    decision.snapshot,
                    tuple(shard for shard, place in kept.items() if place == name),
                )
                for name in inventories
            }
        )
        if decision.snapshot is not None:
            yield from self._restore(decision, lineage)
        ready = m.RestoreReady(self.incarnation, decision.snapshot, {})
        yield from self._demand(dict.fromkeys(world.active, ready))
        world.judge.restored(decision)
        world.start_trainers(self)
        yield lambda: len(self.hellos) == len(world.judge.shards)
        yield from self._make_arenas(decision, lineage)
        self._begin()

    def _admit(self) -> Generator[Callable[[], bool], None, dict[str, m.Inventory]]:
        while True:
            nodes = [node.name for node in self.world.nodes.values() if node.alive]
            for name in nodes:
                self.world.start_smp(name)
            request = m.Admit(self.incarnation, 1.0)
            yield from self._ask(dict.fromkeys(nodes, request))
            answers = {name: self._answer(name, request) for name in nodes}
            errors = {a.error for a in answers.values() if isinstance(a, m.Refused)}
            if "StaleIncarnationError" not in errors:
                return {k: a for k, a in answers.items() if isinstance(a, m.Inventory)}
            self.incarnation += 1

    def _restore(self, decision: Decision, lineage: Any) -> Iterator[Callable[[], bool]]:
        world = self.world
        assert decision.snapshot is not None
        if decision.lost:
            yield from self._rebuild(decision, lineage)
        level = "protected" if decision.protected else "local"
        world.judge.committed(decision.snapshot, level, world.missing())
        commit = m.Commit(self.incarnation, decision.snapshot, level)
        yield from self._demand(dict.fromkeys(world.active, commit))

    def _rebuild(self, decision: Decision, lineage: Any) -> Iterator[Callable[[], bool]]:
        world = self.world
        assert decision.snapshot is not None
        lost = {shard for members in decision.lost.values() for shard in members}
        wanted = create_requests(decision.stripes, self.incarnation, lineage, world.sizes)
        for shard in sorted(lost):
            yield from self._demand({self.places[shard]: wanted[shard]})
        world.start_world(self)
        yield lambda: bool(self.usable_world())
        orders = stripe_orders(
            decision.stripes, self.places, world.active, world.sizes, decision.lost
        )
        request = m.Rebuild(
            self.incarnation, decision.snapshot, decision.iteration, self.encoders, orders
        )
        yield from self._demand(dict.fromkeys(world.active, request))
        yield lambda: self.rebuilt >= lost

    def _make_arenas(self, decision: Decision, lineage: Any) -> Iterator[Callable[[], bool]]:
        world = self.world
        stripes = decision.stripes if decision.snapshot is not None else world.stripes
        wanted = create_requests(stripes, self.incarnation, lineage, world.sizes)
        for shard, request in wanted.items():
            yield from self._demand({self.places[shard]: request})

    def _begin(self) -> None:
        world = self.world
        world.map_arenas(self)
        world.judge.registered = True
        orders = stripe_orders(world.stripes, self.places, world.active, world.sizes)
        self.cycle = SnapshotCycle(self.incarnation, self.places, orders, 1)

    # Events.

    def heard(self, node: str, incarnation: int, body: Any) -> None:
        if incarnation != self.incarnation:
            return
        if isinstance(body, m.EncoderHello) and body.world == self.encoders:
            self.up.add(node)
            if self.cycle is not None and self.usable_world():
                self.cycle.world_changed(self.encoders)
        elif isinstance(body, m.WriterGone) and body.who == self.encoders:
            self.up = set()
            self.failed = self.failed or self.cycle is None
        elif isinstance(body, m.Hello):
            self.hellos.add(body.shard_id)
        elif isinstance(body, m.Rebuilt):
            self.rebuilt.add(body.shard_id)
        elif isinstance(body, m.OrderFailed) and self.cycle is None:
            self.failed = True
        if self.cycle is not None:
            self.carry_out(self.cycle.handle(node, body))

    def answered(self, node: str, request: m.Message, answer: m.Message) -> None:
        if (node, id(request)) in self.pending:
            self.pending[node, id(request)][1] = answer
        elif self.cycle is not None:
            self.carry_out(self.cycle.answered(node, request, answer))

    def carry_out(self, actions: list[c.Action]) -> None:
        for action in actions:
            if isinstance(action, c.Send):
                self.world.note_request(action.message)
                self.world.send(self, action.node, action.message)
            elif isinstance(action, c.KillWorld):
                self.up = set()
                self.world.end_world(action.world)
            elif action.level == "aborted":
                self.world.judge.aborted.add(action.snapshot)


class World:
    """The cluster, the job's notes on disk, and the present life."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.stripes = shape, shape.stripe_states()
        self.sizes = Sizes(64, shape.slots)
        self.judge = Judge(self.stripes, shape.slots)
        names = shape.nodes()
        spares = [f"s{i}" for i in range(shape.spares)]
        self.nodes = {name: Node(name) for name in names + spares}
        self.active = list(names)
        self.incarnation = 0
        self.processes: dict[int, Process] = {}
        self.sessions: dict[str, dict[Any, Any]] = {}
        self.lives: dict[int, Life] = {}
        self.life: Life | None = None
        self.over = False
        self.changed = False
        self.commits = 0
        self.readers: dict[int, Reader] = {}
        self.readers_seen = 0
        self.whole_reads = 0
        self._node_of = {s: i for stripe in self.stripes for i, s in enumerate(stripe.members)}

    def places(self) -> dict[str, str]:
        return {shard: self.active[i] for shard, i in self._node_of.items()}

    def missing(self) -> set[str]:
        """Shards that went with their node, or of which nothing can be heard."""
        there = {(shard, x.name) for x in self.nodes.values() if x.reachable for shard in x.arenas}
        return {shard for shard, node in self.places().items() if (shard, node) not in there}

    def memory(self) -> dict[str, list[MemoryArena]]:
        return {
            x.name: list(x.arenas.values()) for x in self.nodes.values() if x.alive and x.reachable
        }

    def placed(self) -> dict[str, list[MemoryArena]]:
        places = self.places()
        return {
            x.name: [a for a in x.arenas.values() if places[a.shard] == x.name]
            for x in self.nodes.values()
        }

    def trains_on(self, name: str) -> bool:
        """Whether snapshots are taken, of trainers that run on this node among others."""
        life = self.life
        return life is not None and life.cycle is not None and name in life.places.values()

    # What can happen next.

    def enabled(self) -> list[tuple[float, Step]]:
        """Possible steps, each with a weight that makes walks get somewhere."""
        steps: list[tuple[float, Step]] = []
        for process in self.processes.values():
            if process.outbox and self.nodes[process.node].machine is not None:
                steps.append((4.0, ("local", process.pid)))
            if process.alive:
                steps += self._process_steps(process)
        for node in self.nodes.values():
            if node.alive:
                steps += self._node_steps(node)
            else:
                steps.append((0.05, ("repair", node.name)))
        for reader in self.readers.values():
            steps.append((1.0, ("read", reader.number)))
            steps.append((0.02, ("reader_dies", reader.number)))
        return steps + list(self._job_steps())

    def _process_steps(self, p: Process) -> Iterator[tuple[float, Step]]:
        if p.doomed:
            yield 2.0, ("die", p.pid)
        if p.suspended:
            yield 0.3, ("resume", p.pid)
            return
        yield 0.03, ("suspend_writing" if p.writing() else "suspend", p.pid)
        yield 0.01, ("die", p.pid)
        if isinstance(p, Trainer) and p.arena is not None:
            if p.iteration < self._slowest(p.life) + MOST_DRIFT:
                yield 1.0, ("boundary", p.pid)
            if p.run is not None:
                yield 2.0, ("copy", p.pid)
                yield (1.0 if p.revoked() else 0.02), ("abandon", p.pid)
        if isinstance(p, Encoder) and p.can_step():
            yield 3.0, ("encoder", p.pid)

    def _slowest(self, life: int) -> int:
        trainers = [p for p in self.processes.values() if isinstance(p, Trainer) and p.alive]
        return min(p.iteration for p in trainers if p.life == life)

    def _node_steps(self, node: Node) -> Iterator[tuple[float, Step]]:
        yield 0.008, ("lose", node.name)
        yield (0.008, ("cut", node.name)) if node.reachable else (0.2, ("heal", node.name))
        if node.machine is None:
            yield 0.5, ("smp_start", node.name)
            return
        yield 0.01, ("smp_crash", node.name, False)
        yield 0.005, ("smp_crash", node.name, True)
        if node.deaths:
            yield 3.0, ("reap", node.name)
        if node.batch or node.answers or node.machine.effects:
            yield 4.0, ("flush", node.name)
            yield 1.0, ("effect", node.name)
        if not node.answers and not any(isinstance(e, tuple) for e in node.batch):
            for life, queue in node.requests.items():
                if queue and node.reachable:
                    yield 4.0, ("request", node.name, life)
        if node.events and node.reachable:
            yield 4.0, ("event", node.name)
        if self.shape.readers and len(self.readers) < 2:
            for snapshot in self._committed_on(node):
                yield 0.1, ("pin", node.name, snapshot)

    def _committed_on(self, node: Node) -> list[SnapshotId]:
        """What a reader sees to be committed there, in the headers of all arenas."""
        seen = [
            {s.header.snapshot for s in arena.slots if s.header.state == SlotState.COMMITTED}
            for arena in node.arenas.values()
        ]
        found = set.intersection(*seen) if seen else set()
        return sorted(snapshot for snapshot in found if snapshot is not None)

    def _job_steps(self) -> Iterator[tuple[float, Step]]:
        life = self.life
        if life is None or life.failed:
            yield 1.0, ("start_life",)
        elif self._trouble():
            yield (1.0 if life.cycle is not None else 0.1), ("start_life",)
        else:
            yield 0.03, ("start_life",)
        if life is None:
            return
        if any(self._silent(x) and e[1] is None for (x, _), e in life.pending.items()):
            yield 0.3, ("timeout",)
        if life.cycle is not None and not life.failed:
            if life.cycle.phase == Phase.IDLE:
                yield 3.0, ("propose",)
            elif life.cycle.phase == Phase.ENCODING:
                yield 0.05, ("give_up",)
            if self.shape.parity and self.may_start_world(life):
                yield 0.5, ("world",)

    def may_start_world(self, life: Life) -> bool:
        """The supervisor waits until every process of the last world is dead."""
        return not self._encoders(life.encoders)

    def _silent(self, name: str) -> bool:
        node = self.nodes[name]
        return not (node.up and node.reachable)

    def _trouble(self) -> bool:
        """Whether the supervisor knows of a reason to end this life."""
        if any(not (self.nodes[x].alive and self.nodes[x].reachable) for x in self.active):
            return True
        life = self.life
        assert life is not None
        trainers = [p for p in self.processes.values() if isinstance(p, Trainer)]
        return any(p.life == life.incarnation and not p.alive for p in trainers)

    def _encoders(self, world: str) -> list[Encoder]:
        found = (p for p in self.processes.values() if isinstance(p, Encoder) and p.alive)
        return [p for p in found if p.world == world]

    # Taking a step.

    def perform(self, step: Step) -> None:
        """Take one step; Violation if it shows that something is lost."""
        getattr(self, f"_do_{step[0]}")(*step[1:])
        if self.life is not None:
            self.life.resume()
        if self.changed and not self.over:
            self.changed = False
            self.judge.check(self.memory(), self.places())

    def _do_boundary(self, pid: int) -> None:
        self._trainer(pid).boundary()

    def _do_copy(self, pid: int) -> None:
        trainer = self._trainer(pid)
        trainer.copy()
        if trainer.run is None and isinstance(trainer.outbox[-1], m.Sealed):
            self.judge.sealed[trainer.outbox[-1].record.snapshot].add(trainer.shard)
        self.changed = True

    def _do_abandon(self, pid: int) -> None:
        self._trainer(pid).abandon("the fence timed out")

    def _trainer(self, pid: int) -> Trainer:
        process = self.processes[pid]
        assert isinstance(process, Trainer)
        return process

    def _do_encoder(self, pid: int) -> None:
        process = self.processes[pid]
        assert isinstance(process, Encoder)
        process.step()
        self.changed = True

    def _do_suspend(self, pid: int) -> None:
        self.processes[pid].suspended = True

    _do_suspend_writing = _do_suspend

    def _do_resume(self, pid: int) -> None:
        process = self.processes[pid]
        process.suspended = False
        if isinstance(process, Encoder) and self.nodes[process.node].machine is None:
            self.kill(process)

    def _do_die(self, pid: int) -> None:
        self.kill(self.processes[pid])

    def kill(self, process: Process) -> None:
        """SIGKILL; MPI then ends the other ranks of an encoder's world."""
        process.alive = False
        node = self.nodes[process.node]
        if process in node.writers:
            node.writers.remove(process)
            node.deaths.append(process)
        if isinstance(process, Encoder):
            self.end_world(process.world)

    def end_world(self, world: str) -> None:
        for encoder in self._encoders(world):
            encoder.doomed = True

    # Readers.

    def _do_pin(self, name: str, snapshot: SnapshotId) -> None:
        node = self.nodes[name]
        assert node.machine is not None
        self.readers_seen += 1
        number = self.readers_seen
        if isinstance(node.machine.handle(m.Pin(str(number), snapshot, number)), m.Refused):
            return
        slots = [
            (arena.shard, slot)
            for arena in node.arenas.values()
            for slot in arena.slots
            if slot.header.snapshot == snapshot
        ]
        life = (node.machine, node.machine.highest_incarnation)
        self.readers[number] = Reader(number, name, snapshot, slots, life)

    def _do_read(self, number: int) -> None:
        reader = self.readers[number]
        reader.step()
        if reader.done():
            self._judge_reader(reader)
            self._do_reader_dies(number)

    def _judge_reader(self, reader: Reader) -> None:
        machine = self.nodes[reader.node].machine
        in_force = machine is not None and reader.pinned_by == (
            machine,
            machine.highest_incarnation,
        )
        if in_force and (reader.wrong() or not reader.unchanged()):
            raise Violation(f"rule 8: {reader.snapshot} was reused on {reader.node} while pinned")
        if reader.unchanged() and reader.wrong():
            raise Violation(f"rule 8: a reader took {reader.wrong()} for {reader.snapshot}")
        self.whole_reads += reader.unchanged()

    def _do_reader_dies(self, number: int) -> None:
        reader = self.readers.pop(number)
        machine = self.nodes[reader.node].machine
        if machine is not None:
            machine.reader_gone(str(number))

    # Nodes.

    def _do_lose(self, name: str) -> None:
        self._note_loss(name)
        for process in self._on(name):
            self.kill(process)
            process.outbox.clear()
        self.nodes[name] = Node(name, alive=False)
        self.readers = {k: r for k, r in self.readers.items() if r.node != name}
        self.changed = True

    def _on(self, name: str) -> list[Process]:
        return [p for p in self.processes.values() if p.node == name and p.alive]

    def _do_repair(self, name: str) -> None:
        """The machine is back, with nothing on it."""
        self.nodes[name] = Node(name)

    def _do_cut(self, name: str) -> None:
        self._note_loss(name)
        self.nodes[name].reachable = False
        self.changed = True

    def _do_heal(self, name: str) -> None:
        self.nodes[name].reachable = True
        self.changed = True

    def _note_loss(self, name: str) -> None:
        self.judge.node_lost(s for s, place in self.places().items() if place == name)

    # The SMP.

    def _do_smp_crash(self, name: str, losing: bool) -> None:
        """The SMP dies; what was sent to it is lost too, or reaches the next one."""
        node = self.nodes[name]
        node.machine, node.restore = None, None
        node.batch.clear()
        node.answers.clear()
        node.requests.clear()
        for process in self._on(name):
            if losing and process.joined:
                process.outbox.clear()
            if isinstance(process, Encoder) and not process.suspended:
                process.doomed = True

    def _do_smp_start(self, name: str) -> None:
        self.start_smp(name)
        life = self.life
        if life is not None and life.cycle is not None:
            life.carry_out(life.cycle.smp_restarted(name))
        elif life is not None:
            life.failed = True

    def start_smp(self, name: str) -> None:
        """A new SMP from what is in memory: stored headers, the list of writers."""
        node = self.nodes[name]
        if node.machine is not None:
            return
        node.machine = NodeMachine(name, node.highest)
        for arena in node.arenas.values():
            self._enter_arena(node, arena)
        gone, node.deaths = node.deaths, []
        for process in node.writers + gone:
            self._enter(node, process)
        for process in gone:
            self._leave(node, process)

    def _enter(self, node: Node, process: Process) -> None:
        assert node.machine is not None
        role, who = process.key()
        if role == "trainer":
            node.machine.trainer_joined(who)
        else:
            node.machine.encoder_joined(who)

    def _leave(self, node: Node, process: Process) -> None:
        assert node.machine is not None
        role, who = process.key()
        if role == "trainer":
            node.machine.trainer_gone(who, process.pid)
        else:
            node.machine.encoder_gone(who, process.pid)

    def _do_reap(self, name: str) -> None:
        node = self.nodes[name]
        self._leave(node, node.deaths.pop(0))

    def _do_local(self, pid: int) -> None:
        process = self.processes[pid]
        node = self.nodes[process.node]
        message = process.outbox.pop(0)
        assert node.machine is not None
        if isinstance(message, m.Hello | m.EncoderHello):
            if process.alive:
                self._hello(node, process, message)
        else:
            node.machine.handle(message)

    def _hello(self, node: Node, process: Process, message: Any) -> None:
        assert node.machine is not None
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
        event = m.Event(node.name, node.highest, message)
        node.events.append(("event", node.highest, event.body))
        if isinstance(process, Trainer):
            self._load(node, process)

    def evict(self, node: Node, rival: Process) -> None:
        """Rule 7: a writer is registered only after its rivals are dead."""
        self.kill(rival)

    def _load(self, node: Node, trainer: Trainer) -> None:
        """The trainer restores from its slot: it must be there, and its bytes right."""
        assert node.machine is not None
        ready = node.restore
        if ready is None or ready.snapshot is None:
            return
        slots = node.machine.shards.get(trainer.shard)
        index = None if slots is None else slots.find(ready.snapshot)
        if index is None:
            raise Violation(f"{trainer.shard} starts from nothing, others from {ready.snapshot}")
        data = node.arenas[trainer.shard].slots[index].data
        if set(data) != {(ready.snapshot, trainer.shard)}:
            raise Violation(f"{trainer.shard} loads {data} as {ready.snapshot}")
        trainer.iteration = self.judge.iterations[ready.snapshot]

    def _do_flush(self, name: str) -> None:
        node = self.nodes[name]
        self._do_effect(name)
        while node.batch:
            self._do_effect(name)

    def _do_effect(self, name: str) -> None:
        """Carry one effect out; answers leave after everything that came before them."""
        node = self.nodes[name]
        assert node.machine is not None
        if not node.batch:
            node.batch.extend(node.machine.take_effects())
            node.batch.extend(node.answers)
            node.answers.clear()
        if node.batch:
            self._carry_out(node, node.batch.popleft())

    def _carry_out(self, node: Node, effect: Any) -> None:
        assert node.machine is not None
        if isinstance(effect, e.StoreSlot):
            slot = node.arenas[effect.shard_id].slots[effect.slot]
            old, slot.header = slot.header, effect.header
            self.judge.stored(old, effect.header, effect.shard_id, self.placed())
            self.changed = True
        elif isinstance(effect, e.StorePermit):
            node.arenas[effect.shard_id].permit = effect.permit
        elif isinstance(effect, e.ToCoordinator):
            node.events.append(("event", node.machine.highest_incarnation, effect.body))
        elif isinstance(effect, e.ToEncoder):
            for encoder in self._encoders(node.machine.world):
                if encoder.node == node.name:
                    encoder.inbox.append(effect.body)
        elif isinstance(effect, tuple):
            node.events.append(("answer", *effect))

    def _do_request(self, name: str, life: int) -> None:
        node = self.nodes[name]
        request = node.requests[life].popleft()
        answer = self._serve(node, request)
        node.answers.append((life, (request, answer)))

    def _serve(self, node: Node, request: Any) -> m.Message:
        """smp/control_server.py."""
        assert node.machine is not None
        if isinstance(request, m.Admit):
            return self._admit(node, request)
        if request.incarnation != node.machine.highest_incarnation:
            return m.Refused("StaleIncarnationError", "")
        if isinstance(request, m.CreateArena):
            self._create(node, request)
        elif isinstance(request, m.RestoreReady):
            node.restore = request
        else:
            if isinstance(request, m.Adopt):
                self._adopt(node, request)
            return node.machine.handle(request)
        return m.Ok()

    def _admit(self, node: Node, request: m.Admit) -> m.Message:
        assert node.machine is not None
        if request.incarnation <= node.machine.highest_incarnation:
            return m.Refused("StaleIncarnationError", "")
        node.highest = request.incarnation
        self.fence(node)
        node.restore = None
        node.machine.admit(request.incarnation)
        arenas = [
            arena.report(node.machine.inventory_slots(arena.shard))
            for arena in node.arenas.values()
        ]
        return m.Inventory(node.name, 0, tuple(arenas))

    def fence(self, node: Node) -> None:
        """Rule 7: every registered writer is dead before the new incarnation is let in."""
        for process in list(node.writers):
            self.kill(process)
        while node.deaths:
            self._leave(node, node.deaths.pop(0))

    def _create(self, node: Node, request: m.CreateArena) -> None:
        assert node.machine is not None
        if request.shard_id in node.arenas:
            return
        stripe = next(s for s in self.stripes if s.members == request.members)
        slots = [MemorySlot() for _ in range(request.slot_count)]
        arena = MemoryArena(request.shard_id, stripe, request.incarnation, request.lineage, slots)
        node.arenas[request.shard_id] = arena
        self._enter_arena(node, arena)

    def _enter_arena(self, node: Node, arena: MemoryArena) -> None:
        assert node.machine is not None
        node.machine.shards[arena.shard] = ShardSlots(arena.shard, arena.headers())
        node.machine.paths[arena.shard] = ""

    def _adopt(self, node: Node, request: m.Adopt) -> None:
        """What lives elsewhere is removed, the rest takes part in the new life."""
        assert node.machine is not None
        for shard in node.arenas.keys() - set(request.keep):
            del node.arenas[shard], node.machine.shards[shard], node.machine.paths[shard]
        for arena in node.arenas.values():
            arena.incarnation, arena.lineage = request.incarnation, request.lineage
        self.changed = True

    # The job.

    def _do_start_life(self) -> None:
        """The coordinator is gone or gives up; another one starts.  Its words stay under way."""
        number = len(self.lives) + 1
        self.life = self.lives[number] = Life(self, number)

    def _do_timeout(self) -> None:
        assert self.life is not None
        for (node, _), entry in self.life.pending.items():
            if entry[1] is None and self._silent(node):
                entry[1] = m.Refused("Timeout", "")

    def _do_event(self, name: str) -> None:
        kind, number, body = self.nodes[name].events.popleft()
        life = self.life
        if life is None or life.failed:
            return
        if kind == "event":
            life.heard(name, number, body)
        elif number == life.number:
            life.answered(name, *body)

    def _do_propose(self) -> None:
        life = self.life
        assert life is not None and life.cycle is not None
        trainers = [p for p in self.processes.values() if isinstance(p, Trainer) and p.alive]
        progress = max((p.iteration for p in trainers), default=-1)
        actions = life.cycle.propose(progress, life.usable_world())
        if actions:
            self.judge.granted(life.cycle.snapshot, life.cycle.iteration)
        life.carry_out(actions)

    def _do_give_up(self) -> None:
        assert self.life is not None and self.life.cycle is not None
        self.life.carry_out(self.life.cycle.give_up("too slow"))

    def _do_world(self) -> None:
        assert self.life is not None
        self.start_world(self.life)

    def send(self, life: Life, name: str, request: m.Message) -> None:
        if self.nodes[name].up:
            self.nodes[name].requests.setdefault(life.number, deque()).append(request)

    def note_request(self, request: m.Message) -> None:
        if isinstance(request, m.Encode):
            self.judge.encode_ordered(request.snapshot)
        elif isinstance(request, m.Commit):
            self.commits += 1
            self.judge.committed(request.snapshot, request.level, self.missing())

    def replace_lost(self, there: set[str]) -> None:
        spares = [x for x in self.nodes if x in there and x not in self.active]
        for index, name in enumerate(self.active):
            if name not in there:
                self._note_loss(name)
                if not spares:
                    raise LifeFailed
                self.active[index] = spares.pop(0)

    def judge_now(self, inventories: Mapping[str, m.Inventory]) -> Decision:
        for name, inventory in inventories.items():
            if {a.shard_id for a in inventory.arenas} - self.nodes[name].arenas.keys():
                raise LifeFailed  # lost since it answered: the next request would find out
        memory = {x.name: list(x.arenas.values()) for x in self.nodes.values()}
        decision = self.judge.judge(inventories, memory, self.places())
        if decision.snapshot is None and self.judge.local_floor is not None:
            self.over = True
            raise LifeFailed
        return decision

    def start_world(self, life: Life) -> None:
        life.encoders, life.up = f"w{len(self.sessions)}", set()
        sessions = self.sessions[life.encoders] = {}
        for rank, name in enumerate(self.active):
            encoder = Encoder(self._pid(), name, world=life.encoders, rank=rank, sessions=sessions)
            encoder.arenas = self.nodes[name].arenas.__getitem__
            hello = m.EncoderHello(encoder.pid, life.encoders, rank, len(self.active))
            encoder.outbox.append(hello)
            encoder.alive = self.nodes[name].alive
            self.processes[encoder.pid] = encoder
        if not all(self.nodes[name].alive for name in self.active):
            self.end_world(life.encoders)

    def start_trainers(self, life: Life) -> None:
        for rank, (shard, name) in enumerate(self.places().items()):
            if not self.nodes[name].alive:
                raise LifeFailed
            trainer = Trainer(self._pid(), name, shard=shard, life=life.incarnation)
            hello = m.Hello(trainer.pid, rank, 0, 0, shard, (), life.incarnation)
            trainer.outbox.append(hello)
            self.processes[trainer.pid] = trainer

    def map_arenas(self, life: Life) -> None:
        for process in self.processes.values():
            if isinstance(process, Trainer) and process.life == life.incarnation:
                process.arena = self.nodes[process.node].arenas.get(process.shard)

    def _pid(self) -> int:
        return len(self.processes) + 1
