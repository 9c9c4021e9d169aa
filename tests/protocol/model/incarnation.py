"""One incarnation of the modelled job, as supervisor and coordinator lead it.

An incarnation is a list of stages; each says what it waits for.  The order and the requests are
those of supervisor/supervisor.py and supervisor/recovery.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ft.checkpoint.decide import Decision
from megatron_ft.core.errors import StaleIncarnationError
from megatron_ft.core.identity import extend
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import Action, KillWorld, Send, SnapshotCycle
from megatron_ft.supervisor.orders import create_requests, stripe_orders
from megatron_ft.supervisor.schedule import Schedule
from tests.protocol.model.drain import Checkpoint, Drain, decide_with
from tests.protocol.model.node import CYCLE, DRAIN

if TYPE_CHECKING:
    from tests.protocol.model.world import World


class IncarnationFailed(Exception):
    """This incarnation cannot continue; the supervisor starts another."""


class NoSpare(IncarnationFailed):
    """The job stops, and says why; the same command can be run again."""


@dataclass
class Question:
    """A request of a recovery to one node, and its answer."""

    node: str
    request: m.Message
    answer: m.Message | None = None


@dataclass
class Incarnation:
    """``stage`` is the method that comes next, once ``awaits`` holds."""

    number: int
    incarnation: int
    stage: str = "admit"
    awaits: str = ""
    failed: bool = False
    refused: bool = False
    questions: list[Question] = field(default_factory=list)
    asked: int = 0
    places: dict[str, str] = field(default_factory=dict)
    decision: Decision | None = None
    lineage: tuple[Any, ...] = ()
    source: Checkpoint | None = None
    fresh: bool = False
    targets: tuple[str, ...] = ()
    cycle: SnapshotCycle | None = None
    encoders: str = ""
    up: set[str] = field(default_factory=set)
    hellos: set[str] = field(default_factory=set)
    rebuilt: set[str] = field(default_factory=set)
    drain: Drain | None = None
    decided: int = 0

    def resume(self, world: World) -> None:
        """Continue as far as possible."""
        while not self.failed and self.stage and self._ready(world):
            stage, self.stage, self.awaits = self.stage, "", ""
            try:
                getattr(self, f"_{stage}")(world)
            except NoSpare:
                self.failed = self.refused = True
            except IncarnationFailed:
                self.failed = True

    def _ready(self, world: World) -> bool:
        if self.awaits == "answers":
            return all(question.answer is not None for question in self.questions)
        if self.awaits == "world":
            return bool(self.usable_world(world))
        if self.awaits == "rebuilt":
            return self.rebuilt >= set(self.targets)
        if self.awaits == "loaders":
            return world.loaders_ended(self)
        if self.awaits == "hellos":
            return len(self.hellos) == len(world.judge.shards)
        return True

    def usable_world(self, world: World) -> str:
        return self.encoders if self.up >= set(world.active) else ""

    def _then(self, stage: str, awaits: str = "") -> None:
        self.stage, self.awaits = stage, awaits

    def _ask(self, world: World, requests: list[tuple[str, m.Message]], stage: str) -> None:
        self.questions = [Question(node, request) for node, request in requests]
        for node, request in requests:
            world.send(self, node, request, self.asked)
            self.asked += 1
        self._then(stage, "answers")

    def _all_agreed(self) -> None:
        if any(isinstance(question.answer, m.Refused) for question in self.questions):
            raise IncarnationFailed

    # Recovery.

    def _admit(self, world: World) -> None:
        nodes = [node.name for node in world.nodes.values() if world.may_ask(node)]
        for name in nodes:
            world.start_smp(name)
        request = m.Admit(self.incarnation, 1.0, world.kept_ranks())
        self._ask(world, [(name, request) for name in nodes], "decide")

    def _decide(self, world: World) -> None:
        answers = {question.node: question.answer for question in self.questions}
        refusals = [a for a in answers.values() if isinstance(a, m.Refused)]
        if any(isinstance(refusal.error, StaleIncarnationError) for refusal in refusals):
            self.incarnation += 1
            self._then("admit")
            return
        inventories = {k: a for k, a in answers.items() if isinstance(a, m.Inventory)}
        world.replace_lost(set(inventories))
        world.newest_incarnation = self.incarnation
        self.places = world.places()
        memory = world.judge_now(inventories)
        self._settle(world, memory)
        assert self.decision is not None
        kept = self.places if self.decision.snapshot is not None and not self.fresh else {}
        adoptions = [
            (name, self._adoption(tuple(s for s, place in kept.items() if place == name)))
            for name in inventories
        ]
        self._ask(world, adoptions, "adopted")

    def _settle(self, world: World, memory: Decision) -> None:
        """What is restored, what of it from disk, and the lineage of this incarnation."""
        taken = world.choose_from_disk(memory)
        arenas = [holding.arena for holding in memory.holdings.values()]
        newest = max(arenas, key=lambda arena: arena.incarnation, default=None)
        older = () if newest is None else newest.lineage
        if taken is None:
            world.check_not_lost(memory)
            self.decision = memory
        else:
            world.judge.taken_from_disk(taken.snapshot)
            self.source, self.fresh = taken, memory.snapshot is None
            self.decision, self.targets = decide_with(taken, memory, world)
            older = world.judge.noted or taken.lineage
        self.lineage = extend(older, self.incarnation, self.decision.snapshot)
        world.judge.noted = self.lineage

    def _adoption(self, keep: tuple[str, ...]) -> m.Adopt:
        assert self.decision is not None
        return m.Adopt(self.incarnation, self.lineage, self.decision.snapshot, keep)

    def _adopted(self, world: World) -> None:
        self._all_agreed()
        assert self.decision is not None
        if self.decision.lost:
            self.targets = tuple(sorted(s for lost in self.decision.lost.values() for s in lost))
        if not self.targets:
            self._then("commit")
            return
        wanted = create_requests(self.decision.stripes, self.incarnation, self.lineage, world.slots)
        requests = [(self.places[shard], wanted[shard]) for shard in self.targets]
        self._ask(world, requests, "load" if self.source is not None else "summon")

    def _summon(self, world: World) -> None:
        self._all_agreed()
        world.start_world(self)
        self._then("rebuild", "world")

    def _rebuild(self, world: World) -> None:
        decision = self.decision
        assert decision is not None and decision.snapshot is not None
        orders = stripe_orders(decision.stripes, self.places, world.active, decision.lost)
        request = m.Rebuild(
            self.incarnation, decision.snapshot, decision.iteration, self.encoders, orders
        )
        self._ask(world, [(name, request) for name in world.active], "wait_for_rebuilt")

    def _wait_for_rebuilt(self, world: World) -> None:
        self._all_agreed()
        self._then("commit", "rebuilt")

    def _load(self, world: World) -> None:
        self._all_agreed()
        decision = self.decision
        assert decision is not None and decision.snapshot is not None
        requests = []
        for name in world.active:
            shards = tuple(s for s in self.targets if self.places[s] == name)
            load = m.Load(self.incarnation, decision.snapshot, decision.iteration, shards)
            requests += [(name, load)] if shards else []
        self._ask(world, requests, "start_loaders")

    def _start_loaders(self, world: World) -> None:
        self._all_agreed()
        world.start_loaders(self)
        self._then("commit", "loaders")

    def _commit(self, world: World) -> None:
        world.check_loaded(self)
        decision = self.decision
        assert decision is not None
        if decision.snapshot is None:
            self._then("let_go")
            return
        level = "protected" if decision.protected else "local"
        commit = m.Commit(self.incarnation, decision.snapshot, level)
        world.committed(commit)
        self._ask(world, [(name, commit) for name in world.active], "let_go")

    def _let_go(self, world: World) -> None:
        self._all_agreed()
        assert self.decision is not None
        ready = m.RestoreReady(self.incarnation, self.decision.snapshot, {})
        self._ask(world, [(name, ready) for name in world.active], "train")

    def _train(self, world: World) -> None:
        self._all_agreed()
        assert self.decision is not None
        world.judge.restored(self.decision, self.fresh)
        world.start_trainers(self)
        self._then("make_arenas", "hellos")

    def _make_arenas(self, world: World) -> None:
        assert self.decision is not None
        stripes = self.decision.stripes if self.decision.snapshot is not None else world.stripes
        wanted = create_requests(stripes, self.incarnation, self.lineage, world.slots)
        requests = [(self.places[shard], request) for shard, request in wanted.items()]
        self._ask(world, requests, "begin")

    def _begin(self, world: World) -> None:
        self._all_agreed()
        world.map_arenas(self)
        world.judge.registered = True
        orders = stripe_orders(world.stripes, self.places, world.active)
        self.cycle = SnapshotCycle(self.incarnation, self.places, orders, Schedule(1))
        self.cycle.schedule.lead = world.lead

    # Events.

    def heard(self, world: World, node: str, incarnation: int, body: Any) -> None:
        if incarnation != self.incarnation:
            return
        if isinstance(body, m.EncoderHello) and body.world == self.encoders:
            self.up.add(node)
            if self.cycle is not None and self.usable_world(world):
                self.cycle.world_changed(self.encoders)
        elif isinstance(body, m.WriterGone) and body.who == self.encoders:
            self.up = set()
            self.failed = self.failed or self.cycle is None
        elif isinstance(body, m.Hello):
            self.hellos.add(body.shard_id)
        elif isinstance(body, m.Rebuilt):
            self.rebuilt.add(body.shard_id)
            world.known_bad.discard((body.shard_id, body.snapshot))
        elif isinstance(body, m.CorruptShard):
            world.known_bad.add((body.shard_id, body.snapshot))
            self.failed = True
        elif isinstance(body, m.OrderFailed) and self.cycle is None:
            self._rebuild_failed(world, body)
        if self.cycle is not None:
            if isinstance(body, m.BadBlocks):
                world.known_bad.add((body.shard_id, body.snapshot))
            self.carry_out(world, self.cycle.handle(node, body))

    def _rebuild_failed(self, world: World, body: m.OrderFailed) -> None:
        self.failed = True
        if body.corrupt:
            world.known_bad.add((body.corrupt, body.snapshot))

    def answered(self, world: World, node: str, number: int, pair: tuple[Any, Any]) -> None:
        """A node's answer to request ``number``: of a recovery, or for whom it was sent."""
        request, answer = pair
        first = self.asked - len(self.questions)
        if number >= first and number >= 0:
            self.questions[number - first].answer = answer
        elif number == CYCLE and self.cycle is not None:
            self.carry_out(world, self.cycle.answered(node, request, answer))
        elif number == DRAIN and self.drain is not None:
            self.drain.answered(request, answer)

    def carry_out(self, world: World, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                world.note_request(action.message)
                world.send(self, action.node, action.message, CYCLE)
            elif isinstance(action, KillWorld):
                self.up = set()
                world.end_world(action.world)
            else:
                self.decided += 1
                if action.level == "aborted":
                    world.judge.aborted.add(action.snapshot)
                else:
                    world.newest = action.snapshot
