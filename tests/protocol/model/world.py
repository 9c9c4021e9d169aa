"""The cluster, the job's notes on disk, and the present incarnation: taking one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from megatron_ft.arena.format import SlotHeader
from megatron_ft.checkpoint.decide import Decision
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import EventSubscription
from megatron_ft.supervisor.cycle import CyclePhase
from tests.protocol.model.disk import DiskSteps
from tests.protocol.model.drain import Checkpoint, Drain
from tests.protocol.model.encoder import Encoder, MpiWorld
from tests.protocol.model.incarnation import CYCLE, Incarnation, IncarnationFailed, NoSpare
from tests.protocol.model.judge import Judge, Violation
from tests.protocol.model.memory import MemoryArena, damaged
from tests.protocol.model.node import Node, SmpSteps
from tests.protocol.model.processes import Process, Reader, Trainer
from tests.protocol.model.shape import Bounds, Shape, Step


class World(SmpSteps, DiskSteps):
    """Everything there is.  ``incarnation`` is in the supervisor's notes."""

    def __init__(self, shape: Shape, bounds: Bounds | None = None) -> None:
        self.shape, self.bounds, self.stripes = shape, bounds, shape.stripe_states()
        self.slots = shape.slots
        self.lead = 0 if shape.coarse else 1
        self.judge = Judge(self.stripes, shape.slots)
        names = shape.nodes()
        spares = [f"s{i}" for i in range(shape.spares)]
        self.nodes = {name: Node(name) for name in names + spares}
        self.active = list(names)
        self.newest_incarnation = 0
        self.known_bad: set[tuple[str, SnapshotId]] = set()
        self.knows_trainers = False
        self.processes: dict[int, Process] = {}
        self.pids = 0
        self.worlds: dict[str, MpiWorld] = {}
        self.worlds_begun = 0
        self.streams = 0
        self.incarnations = 0
        self.incarnation: Incarnation | None = None
        self.over = False
        self.changed = False
        self.flushing = shape.coarse
        self.commits = 0
        self.newest: SnapshotId | None = None
        self.readers: dict[int, Reader] = {}
        self.readers_seen = 0
        self.whole_reads = 0
        self.disk: list[Checkpoint] = []
        self.disk_away = False
        self.drains_begun = 0
        self.orphans: list[Drain] = []
        self._node_of = {s: i for stripe in self.stripes for i, s in enumerate(stripe.members)}

    def places(self) -> dict[str, str]:
        return {shard: self.active[i] for shard, i in self._node_of.items()}

    def missing(self) -> set[str]:
        """Shards that went with their node, or of which nothing can be heard."""
        there = {
            (shard, x.name)
            for x in self.nodes.values()
            if x.reachable and not x.frozen
            for shard in x.arenas
        }
        return {shard for shard, node in self.places().items() if (shard, node) not in there}

    def memory(self) -> dict[str, list[MemoryArena]]:
        return {
            x.name: list(x.arenas.values())
            for x in self.nodes.values()
            if x.alive and x.reachable and not x.frozen
        }

    def placed(self) -> dict[str, list[MemoryArena]]:
        places = self.places()
        return {
            x.name: [a for a in x.arenas.values() if places[a.shard] == x.name]
            for x in self.nodes.values()
        }

    def trains_on(self, name: str) -> bool:
        """Whether snapshots are taken, of trainers that run on this node among others."""
        incarnation = self.incarnation
        return (
            incarnation is not None
            and incarnation.cycle is not None
            and name in incarnation.places.values()
        )

    # Taking a step.

    def perform(self, step: Step) -> None:
        """Take one step; Violation if it shows that something is lost."""
        getattr(self, f"_do_{step[0]}")(*step[1:])
        if self.flushing:
            self._settle()
        if self.incarnation is not None:
            self.incarnation.resume(self)
            if self.flushing:
                self._settle()
        if self.changed and not self.over:
            self.changed = False
            self.check()

    def _settle(self) -> None:
        """In a coarse job all effects of a step follow at once."""
        for node in self.nodes.values():
            while node.working and (node.batch or node.answers or node.machine.effects):
                self._do_effect(node.name)
        gone = [pid for pid, p in self.processes.items() if not p.alive and self._forgotten(p)]
        for pid in gone:
            del self.processes[pid]

    def _forgotten(self, p: Process) -> bool:
        """Whether nothing will ever be heard of a dead process."""
        current = (
            self.incarnation is not None
            and isinstance(p, Trainer)
            and p.incarnation == self.incarnation.incarnation
        )
        node = self.nodes[p.node]
        return not (current or (p.outbox and node.alive) or p in node.deaths)

    def check(self) -> None:
        """What would be served if everything stopped now."""
        self.judge.check(self.memory(), self.places())

    def note_store(self, shard: str, old: SlotHeader, new: SlotHeader) -> None:
        self.judge.stored(old, new, shard, self.placed())
        self.changed = True

    # Processes.

    def _do_boundary(self, pid: int) -> None:
        self._trainer(pid).boundary()

    def _do_copy(self, pid: int) -> None:
        trainer = self._trainer(pid)
        trainer.copy()
        while self.shape.coarse and trainer.run is not None:
            trainer.copy()
        if trainer.run is None and isinstance(trainer.outbox[-1], m.Sealed):
            self.judge.sealed[trainer.outbox[-1].record.snapshot].add(trainer.shard)
        self.changed = True

    def _do_not_given(self, pid: int) -> None:
        self._trainer(pid).abandon("its slot was not given in time")

    def _do_abandon(self, pid: int) -> None:
        self._trainer(pid).abandon("the fence timed out")

    def _trainer(self, pid: int) -> Trainer:
        process = self.processes[pid]
        assert isinstance(process, Trainer)
        return process

    def _do_encoder(self, pid: int) -> None:
        process = self.processes[pid]
        assert isinstance(process, Encoder)
        process.step(self.nodes[process.node].arenas)
        self.changed = True

    def _do_suspend(self, pid: int) -> None:
        self.processes[pid].suspended = True

    _do_suspend_writing = _do_suspend

    def _do_resume(self, pid: int) -> None:
        process = self.processes[pid]
        process.suspended = False
        if not isinstance(process, Trainer) and self.nodes[process.node].machine is None:
            self.kill(process)

    def _do_die(self, pid: int) -> None:
        self.kill(self.processes[pid])

    _do_end = _do_die

    def kill(self, process: Process) -> None:
        """SIGKILL; MPI then ends the other ranks of an encoder's world."""
        process.alive = False
        node = self.nodes[process.node]
        if process in node.writers:
            node.writers.remove(process)
            node.deaths.append(process)
        if isinstance(process, Encoder):
            process.mpi.broken = True
            self.end_world(process.world)

    def end_world(self, world: str) -> None:
        for encoder in self._encoders(world):
            encoder.doomed = True

    def _encoders(self, world: str) -> list[Encoder]:
        found = (p for p in self.processes.values() if isinstance(p, Encoder) and p.alive)
        return [p for p in found if p.world == world]

    def _on(self, name: str) -> list[Process]:
        return [p for p in self.processes.values() if p.node == name and p.alive]

    def _pid(self) -> int:
        self.pids += 1
        return self.pids

    # Nodes.

    def _do_lose(self, name: str) -> None:
        self._note_loss(name)
        for process in self._on(name):
            self.kill(process)
            process.outbox.clear()
        self.nodes[name] = Node(name, alive=False)
        self.readers = {k: r for k, r in self.readers.items() if r.node != name}
        self.changed = True

    def _do_repair(self, name: str) -> None:
        """The machine is back, with nothing on it."""
        self.nodes[name] = Node(name)

    def _do_cut(self, name: str) -> None:
        self._note_loss(name)
        self.nodes[name].reachable = False
        self.changed = True

    def _do_heal(self, name: str) -> None:
        node = self.nodes[name]
        node.reachable = True
        node.expired = node.expired and node.frozen
        self.changed = True

    def _do_freeze(self, name: str) -> None:
        self._note_loss(name)
        self.nodes[name].frozen = True
        self.changed = True

    def _do_thaw(self, name: str) -> None:
        node = self.nodes[name]
        node.frozen, node.late = False, node.expired
        self.changed = True

    def _note_loss(self, name: str) -> None:
        self.judge.node_lost(s for s, place in self.places().items() if place == name)

    # The job.

    def _do_start_incarnation(self) -> None:
        """The coordinator gives up; another one starts.  Its words stay under way."""
        self.incarnations += 1
        drain = None if self.incarnation is None else self.incarnation.drain
        if drain is not None and drain.stage in ("publishing", "tidying"):
            self.orphans.append(drain)
        self.incarnation = Incarnation(self.incarnations, self.newest_incarnation + 1)
        for node in self.nodes.values():
            node.events.clear()
            node.inbox = EventSubscription()
        self.processes = {
            pid: p for pid, p in self.processes.items() if p.alive or not self._forgotten(p)
        }

    def _do_restart(self) -> None:
        """The supervisor dies, and with it what it knew; another one is started."""
        self.known_bad.clear()
        self.knows_trainers = False
        self._do_start_incarnation()

    def _do_timeout(self) -> None:
        assert self.incarnation is not None
        for question in self.incarnation.questions:
            if question.answer is None and self.given_up(question.node):
                question.answer = m.Refused(ControlPlaneError(""))

    def given_up(self, name: str) -> bool:
        """Whether the coordinator waits no longer for a node: its lease has run out by then."""
        node = self.nodes[name]
        return not node.answering and (node.machine is None or node.expired or not self.leases())

    def leases(self) -> bool:
        """Whether a silent node is waited for until its lease has run out."""
        return True

    def may_ask(self, node: Node) -> bool:
        """Whether a recovery asks a node at all."""
        if node.machine is None:
            return node.alive and node.reachable
        return node.answering or not self.given_up(node.name)

    def _do_event(self, name: str) -> None:
        event = self.nodes[name].events.popleft()
        incarnation = self.incarnation
        if incarnation is None or incarnation.failed:
            return
        if event[0] == "event":
            incarnation.heard(self, name, event[1], event[2])
        elif event[0] == "report":
            self._hear(self.nodes[name].inbox.take(event[1]))
        elif event[1] == incarnation.number:
            incarnation.answered(self, name, event[2], event[3])

    def _hear(self, events: list[m.NodeEvent]) -> None:
        for event in events:
            if self.incarnation is not None and not self.incarnation.failed:
                self.incarnation.heard(self, event.node, event.incarnation, event.body)

    def _do_late_answer(self, name: str, index: int) -> None:
        """An answer comes from an older connection."""
        number, whose, pair = self.nodes[name].late_answers.pop(index)
        if (
            self.incarnation is not None
            and not self.incarnation.failed
            and number == self.incarnation.number
        ):
            self.incarnation.answered(self, name, whose, pair)

    def _do_propose_anyway(self) -> None:
        """Encoders are not expected back: the last protected snapshot gives way."""
        self.judge.protected_given_up()
        self._do_propose(give_up_protected=True)

    def _do_protect(self) -> None:
        """Encoders are back: the newest local snapshot gets its parity where it lies."""
        incarnation = self.incarnation
        assert incarnation is not None and incarnation.cycle is not None and self.newest is not None
        iteration = self.judge.iterations[self.newest]
        incarnation.carry_out(
            self, incarnation.cycle.protect(self.newest, iteration, incarnation.usable_world(self))
        )

    def may_protect(self, incarnation: Incarnation) -> bool:
        newest = self.newest
        local = newest is not None and newest not in self.judge.protected
        return self.shape.parity and local and bool(incarnation.usable_world(self))

    def crowded(self) -> bool:
        """Whether the last protected snapshot is in the way of the next one."""
        return any(x.working and x.machine.crowded() for x in self.nodes.values())

    def _do_propose(self, give_up_protected: bool = False) -> None:
        incarnation = self.incarnation
        assert incarnation is not None and incarnation.cycle is not None
        trainers = [p for p in self.processes.values() if isinstance(p, Trainer) and p.alive]
        progress = max((p.iteration for p in trainers), default=-1)
        actions = incarnation.cycle.propose(
            progress, incarnation.usable_world(self), give_up_protected=give_up_protected
        )
        if actions:
            self.judge.granted(incarnation.cycle.snapshot, incarnation.cycle.iteration)
        incarnation.carry_out(self, actions)

    def _do_give_up(self) -> None:
        assert self.incarnation is not None and self.incarnation.cycle is not None
        self.incarnation.carry_out(self, self.incarnation.cycle.give_up("too slow"))

    def _do_resend(self, name: str) -> None:
        """A word that decides a snapshot was not answered in time: it is sent once more."""
        incarnation = self.incarnation
        assert incarnation is not None and incarnation.cycle is not None
        word = self.unanswered(name)
        assert word is not None
        self.send(incarnation, name, word, CYCLE)

    def unanswered(self, name: str) -> m.Commit | m.Abort | None:
        """The deciding word that a node has not answered yet."""
        cycle = None if self.incarnation is None else self.incarnation.cycle
        if cycle is None or cycle.phase not in (CyclePhase.COMMITTING, CyclePhase.ABORTING):
            return None
        actions = cycle._repeat(name)
        return actions[0].message if actions else None

    def _do_world(self) -> None:
        assert self.incarnation is not None
        self.start_world(self.incarnation)

    def may_start_world(self, incarnation: Incarnation) -> bool:
        """The supervisor waits until every process of the last world is dead."""
        return not self._encoders(incarnation.encoders)

    def send(self, incarnation: Incarnation, name: str, request: m.Message, number: int) -> None:
        if self.nodes[name].up:
            queue = self.nodes[name].requests.setdefault(incarnation.number, deque())
            queue.append((number, request))
            if self.shape.resets and number == CYCLE:
                self.nodes[name].repeats.append((incarnation.number, request))

    def note_request(self, request: m.Message) -> None:
        if isinstance(request, m.Encode):
            self.judge.encode_ordered(request.snapshot)
        elif isinstance(request, m.Commit):
            self.commits += 1
            self.committed(request)

    def committed(self, request: m.Commit) -> None:
        self.judge.committed(request.snapshot, request.level, self.missing())
        if request.level == "protected":
            self.judge.hurt &= {shard for shard, _ in damaged(self.placed())}

    def replace_lost(self, there: set[str]) -> None:
        spares = [x for x in self.nodes if x in there and x not in self.active]
        for index, name in enumerate(self.active):
            if name not in there:
                self._note_loss(name)
                if not spares:
                    raise NoSpare
                self.active[index] = spares.pop(0)

    def judge_now(self, inventories: Mapping[str, m.Inventory]) -> Decision:
        for name, inventory in inventories.items():
            if {a.shard_id for a in inventory.arenas} - self.nodes[name].arenas.keys():
                raise IncarnationFailed  # lost since it answered: the next request would find out
        memory = {x.name: list(x.arenas.values()) for x in self.nodes.values()}
        return self.judge.judge(inventories, memory, self.places(), self.known_bad)

    def start_world(self, incarnation: Incarnation) -> None:
        self.worlds_begun += 1
        incarnation.encoders, incarnation.up = f"w{self.worlds_begun}", set()
        mpi = MpiWorld()
        for rank, name in enumerate(self.active):
            encoder = Encoder(self._pid(), name, world=incarnation.encoders, rank=rank, mpi=mpi)
            encoder.coarse = self.shape.coarse
            hello = m.EncoderHello(encoder.pid, incarnation.encoders, incarnation.incarnation)
            encoder.outbox.append(hello)
            encoder.alive = self.nodes[name].alive
            self.processes[encoder.pid] = encoder
            self._register_at_once(encoder)
        if not all(self.nodes[name].alive for name in self.active):
            self.end_world(incarnation.encoders)

    def start_trainers(self, incarnation: Incarnation) -> None:
        self._check_alone(incarnation)
        assert incarnation.decision is not None
        self.newest = incarnation.decision.snapshot
        for rank, (shard, name) in enumerate(self.places().items()):
            if not self.nodes[name].alive:
                raise IncarnationFailed
            trainer = self._survivor(shard, name) or Trainer(self._pid(), name, shard=shard)
            trainer.reenter(incarnation.incarnation)
            hello = m.Hello(trainer.pid, rank, 0, shard, (), incarnation.incarnation)
            trainer.outbox.append(hello)
            self.processes[trainer.pid] = trainer
            self._register_at_once(trainer)
        self.knows_trainers = True

    def kept_ranks(self) -> tuple[int, ...]:
        """Ranks whose process the supervisor knows: one that was restarted knows none."""
        known = self.shape.survivors and self.knows_trainers
        return tuple(range(len(self.places()))) if known else ()

    def _survivor(self, shard: str, name: str) -> Trainer | None:
        for p in self._on(name):
            if isinstance(p, Trainer) and p.released and p.shard == shard:
                return p
        return None

    def _register_at_once(self, process: Process) -> None:
        """In a coarse job a process is known to its SMP from its start."""
        if self.shape.coarse and process.alive and self.nodes[process.node].working:
            self._do_local(process.pid)

    def _check_alone(self, incarnation: Incarnation) -> None:
        """No older incarnation trains on, as long as there is an SMP that can end it."""
        for p in self.processes.values():
            known = isinstance(p, Trainer) and (p.joined or p.released)
            if known and p.alive and p.arena is not None:
                node = self.nodes[p.node]
                if p.incarnation < incarnation.incarnation and node.working and not node.late:
                    raise Violation(
                        f"trainers of {p.incarnation} and {incarnation.incarnation} run at once"
                    )

    def map_arenas(self, incarnation: Incarnation) -> None:
        for process in self.processes.values():
            if isinstance(process, Trainer) and process.incarnation == incarnation.incarnation:
                process.arena = self.nodes[process.node].arenas.get(process.shard)
