"""Section "protocol" of docs/protocol.md under random interleavings, with and without its rules.

MEGATRON_FT_MODEL_WALKS (default 12) is the number of walks per shape; run a few thousand
after a change to the protocol.  A failure prints the shortest list of steps found, which
``replay`` takes again.  The other half of this file switches the rules off one by one: the
same walks must then lose something, or they would prove nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import protocol_memory
import pytest
from protocol_memory import Judge, Violation, record_of
from protocol_model import Node, Shape, Step, World
from protocol_processes import Process, Reader

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.coordinator.cycle import Action, Phase, SnapshotCycle
from megatron_ft.identity import SealedRecord, SnapshotId
from megatron_ft.recovery import decide
from megatron_ft.recovery.decide import Holding, usable
from megatron_ft.smp import messages as m
from megatron_ft.smp import node
from megatron_ft.smp.effects import StoreSlot
from megatron_ft.smp.slots import ShardSlots

WALKS = int(os.environ.get("MEGATRON_FT_MODEL_WALKS", "12"))
STEPS = 1500
WEATHER = (0.0, 0.1, 0.3, 1.0)
"""How often faults happen, for a hundred steps each: without calm nothing gets protected."""
LEAST = 0.1
"""Steps of less weight are faults."""
SHAPES = {
    "xor:3": Shape("xor", 2, 1, spares=1, slots=2),
    "xor:3, 3 slots": Shape("xor", 2, 1, spares=1, slots=3),
    "xor:3, 2 stripes": Shape("xor", 2, 1, spares=1, slots=2, stripes=2),
    "rs:2+2": Shape("rs", 2, 2, spares=1, slots=2),
    "none": Shape("none", 1, 0, spares=0, slots=2),
    "xor:3, readers": Shape("xor", 2, 1, spares=1, slots=2, readers=True),
}


def walk(
    shape: Shape,
    seed: int,
    steps: int = STEPS,
    bias: Mapping[str, float] = {},  # noqa: B006
) -> tuple[list[Step], World, str]:
    """Random steps from a seed; the third result says what went wrong, or is empty.

    ``bias`` makes kinds of steps more or less frequent.
    """
    choose, world = random.Random(seed), World(shape)
    taken: list[Step] = []
    weather = 0.0
    while len(taken) < steps and not world.over:
        if len(taken) % 100 == 0:
            weather = choose.choice(WEATHER)
        enabled = world.enabled()
        weights = [
            (weight if weight >= LEAST else weight * weather) * bias.get(step[0], 1.0)
            for weight, step in enabled
        ]
        taken.append(choose.choices([step for _, step in enabled], weights)[0])
        try:
            world.perform(taken[-1])
        except (Violation, AssertionError) as error:
            return taken, world, f"{type(error).__name__}: {error}"
    return taken, world, ""


@dataclass(frozen=True)
class Until:
    """Random steps without faults until something holds; ``bias`` as in walk."""

    holds: Callable[[World], bool]
    bias: Mapping[str, float] = field(default_factory=dict)


def directed(shape: Shape, seed: int, script: Iterable[Until | Step]) -> str:
    """Given steps at given moments, for what random walks meet too seldom."""
    choose, world = random.Random(seed), World(shape)
    try:
        for part in script:
            if not isinstance(part, Until):
                world.perform(part)
                continue
            while not part.holds(world):
                calm = [(w * part.bias.get(s[0], 1.0), s) for w, s in world.enabled() if w >= LEAST]
                world.perform(choose.choices([s for _, s in calm], [w for w, _ in calm])[0])
    except Violation as error:
        return str(error)
    return ""


def replay(shape: Shape, steps: Iterable[Step]) -> str:
    """Take those of the steps that are possible; what went wrong, or empty."""
    world = World(shape)
    for step in steps:
        if step in [possible for _, possible in world.enabled()]:
            try:
                world.perform(step)
            except (Violation, AssertionError) as error:
                return f"{type(error).__name__}: {error}"
    return ""


def shorten(shape: Shape, steps: list[Step]) -> list[Step]:
    """A shorter list of steps that still goes wrong: leave out ever smaller pieces."""
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if replay(shape, shorter):
                steps = shorter
            else:
                at += size
        size //= 2
    return steps


# A node is cut off with a local snapshot that its job then goes back behind; when it returns,
# the spare in its place is lost, and it takes its old place with its old bytes.
CUT_OFF: list[Until | Step] = [
    Until(lambda world: world.judge.floor is not None),
    ("smp_crash", "n0", False),  # its encoder leaves, and with it the world
    Until(lambda world: world.judge.local_floor != world.judge.floor, {"world": 0.0}),
    ("cut", "n1"),
    Until(lambda world: world.trains_on("s0"), {"heal": 0.0, "propose": 0.0}),
    ("lose", "s0"),
    ("heal", "n1"),
    Until(lambda world: world.trains_on("n1")),
]


@pytest.mark.parametrize("seed", range(5))
def test_what_was_rolled_back_does_not_come_back_with_a_node(seed: int) -> None:
    assert directed(SHAPES["xor:3"], seed, CUT_OFF) == ""


def test_without_the_lineage_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    no_lineage(monkeypatch)
    problems = [directed(SHAPES["xor:3"], seed, CUT_OFF) for seed in range(5)]
    assert any("was rolled back and is served" in problem for problem in problems)


@pytest.mark.parametrize("name", SHAPES)
def test_no_interleaving_loses_a_snapshot(name: str) -> None:
    """All rules on: I1 and I2 hold after every step, and the walks are not idle ones."""
    commits = reads = 0
    for seed in range(WALKS):
        steps, world, problem = walk(SHAPES[name], seed)
        assert not problem, explain(name, steps)
        commits += world.commits
        reads += world.whole_reads
    assert commits >= WALKS
    assert reads >= WALKS * SHAPES[name].readers


def explain(name: str, steps: list[Step]) -> str:
    """The shortest way found to the problem, for the message of a failed test."""
    short = shorten(SHAPES[name], steps)
    lines = "\n".join(map(str, short))
    return f"{replay(SHAPES[name], short)}\nshape {name!r}, {len(short)} steps:\n{lines}"


# Each rule switched off.  The walks must then find what the rule is for.


def no_doubt(patch: pytest.MonkeyPatch) -> None:
    """A slot in doubt may be reused, and the next permit does not wait for all commits."""
    keep = ShardSlots.may_reuse

    def may_reuse(self: ShardSlots, index: int) -> bool:
        in_doubt = (SlotState.SEALED, SlotState.PROTECTED)
        return self.slots[index].state in in_doubt or keep(self, index)

    patch.setattr(ShardSlots, "may_reuse", may_reuse)
    hasten(patch)


def hasten(patch: pytest.MonkeyPatch) -> None:
    """The first node's answer to a commit counts for all."""
    keep = SnapshotCycle.answered

    def answered(
        self: SnapshotCycle, node: str, request: m.Message, answer: m.Message
    ) -> list[Action]:
        if isinstance(request, m.Commit) and request.snapshot == self.snapshot:
            self._waiting &= {node}
        return keep(self, node, request, answer)

    patch.setattr(SnapshotCycle, "answered", answered)


def local_is_enough(patch: pytest.MonkeyPatch) -> None:
    """The last protected snapshot may be given up for a newer one that is only local."""
    patch.setattr(ShardSlots, "may_reuse", _committed_or_free)


def _committed_or_free(self: ShardSlots, index: int) -> bool:
    return self.slots[index].state in (SlotState.FREE, SlotState.COMMITTED)


def per_rank_skip(patch: pytest.MonkeyPatch) -> None:
    """A rank that missed the iteration is left out, the others go on."""

    def gave_up(self: SnapshotCycle, body: m.Missed | m.Abandoned) -> list[Action]:
        if body.snapshot != self.snapshot or self.phase != Phase.CAPTURING:
            return []
        record = record_of(self.snapshot, body.shard_id, self.iteration)
        return self._sealed(m.Sealed(record))

    patch.setattr(SnapshotCycle, "_gave_up", gave_up)


def iteration_is_identity(patch: pytest.MonkeyPatch) -> None:
    """A slot is taken for a snapshot because its iteration is right, whoever's life it is of."""
    patch.setattr(node, "on_lineage", lambda snapshot, lineage: True)
    iterations: dict[SnapshotId, int] = {}

    def granted(self: Judge, snapshot: SnapshotId, iteration: int) -> None:
        iterations[snapshot] = iteration
        keep(self, snapshot, iteration)

    def slot(self: Holding, snapshot: SnapshotId) -> m.SlotReport | None:
        same = [s for s in self.arena.slots if s.iteration == iterations[snapshot] and usable(s)]
        return same[-1] if same else None

    keep = Judge.granted
    patch.setattr(Judge, "granted", granted)
    patch.setattr(Holding, "slot", slot)


def no_lineage(patch: pytest.MonkeyPatch) -> None:
    """What was rolled back counts as a part of the job's past."""
    patch.setattr(decide, "on_lineage", lambda snapshot, lineage: True)
    patch.setattr(node, "on_lineage", lambda snapshot, lineage: True)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A new incarnation is let in while writers of the old one are alive."""

    def fence(self: World, node: Node) -> None:
        for process in list(node.writers):
            if process.suspended:
                node.writers.remove(process)
                self._leave(node, process)
        keep(self, node)

    keep = World.fence
    patch.setattr(World, "fence", fence)


def no_wait_for_writers(patch: pytest.MonkeyPatch) -> None:
    """An encoder counts as gone when it was told to go, not when it is dead."""

    def evict(self: World, at: Node, rival: Process) -> None:
        at.writers.remove(rival)
        self._leave(at, rival)

    patch.setattr(World, "evict", evict)
    patch.setattr(World, "may_start_world", lambda self, life: not life.usable_world())
    patch.setattr(ShardSlots, "still_written", lambda self, state, trainer, encoder: False)
    keep = SnapshotCycle._break

    def at_once(self: SnapshotCycle, reason: str) -> list[Action]:
        actions = keep(self, reason)
        return actions + self._abort(reason) if actions else []

    patch.setattr(SnapshotCycle, "_break", at_once)


def encode_early(patch: pytest.MonkeyPatch) -> None:
    """Encoding starts when the first rank has sealed."""
    patch.setattr(SnapshotCycle, "all_sealed", lambda self, waiting: True)


def digests_at_home(patch: pytest.MonkeyPatch) -> None:
    """Each member stores its own digests only, so they are lost with it."""
    keep = ShardSlots.protect

    def protect(
        self: ShardSlots, snapshot: SnapshotId, root: bytes, table: tuple[SealedRecord, ...]
    ) -> None:
        keep(self, snapshot, root, tuple(r for r in table if r.shard_id == self.shard_id))

    patch.setattr(ShardSlots, "protect", protect)


def parity_stays_valid(patch: pytest.MonkeyPatch) -> None:
    """Parity is not marked invalid before its first byte is written anew."""
    keep = ShardSlots.begin_encode

    def begin_encode(self: ShardSlots, snapshot: SnapshotId) -> int:
        index = keep(self, snapshot)
        table = tuple(record_of(snapshot, f"dp{i}", self.slots[index].iteration) for i in range(6))
        self._put(index, replace(self.slots[index], parity_valid=True, stripe_table=table))
        return index

    def without_parity(self: ShardSlots, index: int, state: SlotState) -> SlotHeader:
        return replace(self.slots[index], state=state)

    patch.setattr(ShardSlots, "_without_parity", without_parity)
    patch.setattr(ShardSlots, "begin_encode", begin_encode)


def target_counts_as_whole(patch: pytest.MonkeyPatch) -> None:
    """A rebuild target counts before its digests have matched."""

    def begin_rebuild(self: ShardSlots, snapshot: SnapshotId, iteration: int) -> int:
        index = keep(self, snapshot, iteration)
        record = record_of(snapshot, self.shard_id, iteration)
        target = replace(self.slots[index], state=SlotState.REBUILDING, record=record)
        self._put(index, target)
        return index

    keep = ShardSlots.begin_rebuild
    patch.setattr(ShardSlots, "begin_rebuild", begin_rebuild)
    keep_gone = ShardSlots.encoder_gone

    def encoder_gone(self: ShardSlots) -> list[SnapshotId]:
        for index, slot in enumerate(self.slots):
            if slot.state == SlotState.REBUILDING:
                self._put(index, replace(slot, state=SlotState.SEALED))
        return keep_gone(self)

    patch.setattr(ShardSlots, "encoder_gone", encoder_gone)


def anybody_owns(patch: pytest.MonkeyPatch) -> None:
    """What lies on a node that no longer is the shard's place counts as the shard."""
    patch.setattr(protocol_memory, "owned", lambda inventories, places: [*inventories.values()])


def shadows(patch: pytest.MonkeyPatch) -> None:
    """Headers are stored in another order than the one in which they were decided."""

    def collect_changes(self: node.NodeMachine) -> None:
        stores = [
            StoreSlot(shard_id, slot, header)
            for shard_id, slots in self.shards.items()
            for slot, header in slots.take_changes()
        ]
        self.effects = [*stores, *self.effects, *self._said]
        self._said = []

    patch.setattr(node.NodeMachine, "_collect_changes", collect_changes)


def no_pins(patch: pytest.MonkeyPatch) -> None:
    """A slot is reused in spite of its readers."""
    patch.setattr(ShardSlots, "pin", lambda self, reader, snapshot: None)


def no_second_look(patch: pytest.MonkeyPatch) -> None:
    """A reader trusts its pin although the SMP that gave it is gone."""
    patch.setattr(Reader, "unchanged", lambda self: True)


LONG_SLEEP = {"suspend": 0.0, "suspend_writing": 2.0, "resume": 0.03, "start_life": 3.0}
SLOW_DEATH = {**LONG_SLEEP, "suspend_writing": 6.0, "die": 0.005, "give_up": 20.0, "lose": 0.0}
COME_AND_GO = {"cut": 8.0, "heal": 0.5, "lose": 4.0, "world": 0.2}
SLOW_READERS = {"read": 0.05, "smp_crash": 5.0}
RESTARTS = {"start_life": 10.0, "world": 0.1}


@dataclass(frozen=True)
class Hole:
    """How to walk into it: kinds of steps that lead there, a seed near it, what is found."""

    found: str
    seed: int = 0
    shape: str = "xor:3"
    bias: Mapping[str, float] = field(default_factory=dict)


HOLES: dict[Callable[[pytest.MonkeyPatch], None], Hole] = {
    no_doubt: Hole("reuses its slot in doubt", 20),
    local_is_enough: Hole("no newer one is protected everywhere"),
    per_rank_skip: Hole("it is being captured"),
    iteration_is_identity: Hole("would be served as", 20, "xor:3, 3 slots", RESTARTS),
    no_fence: Hole("would be served as", 70, bias=LONG_SLEEP),
    no_wait_for_writers: Hole("would be rebuilt from parity of", 15, bias=SLOW_DEATH),
    encode_early: Hole("it is being captured"),
    digests_at_home: Hole("nobody can verify"),
    parity_stays_valid: Hole("would be rebuilt from parity of"),
    target_counts_as_whole: Hole("would be served as"),
    anybody_owns: Hole("starts from nothing", 35, bias=COME_AND_GO),
    shadows: Hole("reuses its slot in doubt", 20),
    no_pins: Hole("while pinned", shape="xor:3, readers", bias=SLOW_READERS),
    no_second_look: Hole("a reader took", shape="xor:3, readers", bias=SLOW_READERS),
}
MOST_WALKS = 200


@pytest.mark.parametrize("switch_off", HOLES, ids=lambda hole: hole.__name__)
def test_without_a_rule_something_is_lost(
    switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    hole = HOLES[switch_off]
    for seed in range(hole.seed, hole.seed + MOST_WALKS):
        problem = walk(SHAPES[hole.shape], seed, bias=hole.bias)[2]
        if problem.startswith(Violation.__name__) and hole.found in problem:
            return
    pytest.fail(f"{MOST_WALKS} walks without the rule and nothing was lost: the model is blind")
