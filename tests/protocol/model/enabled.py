"""Which steps are possible in a World, each with a weight that makes walks get somewhere.

With bounds, steps that would only make the job longer (another iteration, snapshot, drain or
reader) are left out where the bounds say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ft.arena.format import SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.supervisor.cycle import CyclePhase
from tests.protocol.model.encoder import Encoder
from tests.protocol.model.incarnation import Incarnation
from tests.protocol.model.node import Node
from tests.protocol.model.processes import Loader, Process, Trainer
from tests.protocol.model.shape import Step
from tests.protocol.model.world import World

MOST_DRIFT = 2
FAULTS = {
    "abandon": "a capture gives up because the fence cannot wait",
    "cut": "a node is cut off",
    "die": "a trainer, encoder or loader dies",
    "disk_away": "the disk cannot be read",
    "drain_dies": "a process of a drain dies",
    "flip": "a block of a committed shard goes bad",
    "freeze": "an SMP is suspended",
    "give_up": "capturing or encoding takes too long",
    "lose": "a node is lost with all it holds",
    "reader_dies": "a reader dies",
    "reset": "a connection is made anew without what was under way",
    "resend": "the answer to Commit or Abort takes too long",
    "restart": "the supervisor dies and is started again",
    "smp_crash": "an SMP dies",
    "smp_crash_in": "an SMP dies between two effects of one message",
    "suspend": "a process is suspended",
    "suspend_writing": "a process is suspended while it writes",
}
Weighted = tuple[float, Step]


def enabled(world: World) -> list[Weighted]:
    """All steps that can come next."""
    steps: list[Weighted] = []
    for process in world.processes.values():
        if process.outbox and world.nodes[process.node].working:
            steps.append((4.0, ("local", process.pid)))
        if process.alive:
            steps += _process_steps(world, process)
    for node in world.nodes.values():
        if node.alive:
            steps += _node_steps(world, node)
        elif not world.bounds:
            steps.append((0.05, ("repair", node.name)))
    for reader in world.readers.values():
        steps.append((1.0, ("read", reader.number)))
        steps.append((0.02, ("reader_dies", reader.number)))
    return [*steps, *_job_steps(world), *_disk_steps(world)]


def is_fault(step: Step) -> bool:
    """Whether something goes wrong in this step that need not."""
    return step[0] in FAULTS


def _process_steps(world: World, p: Process) -> Iterator[Weighted]:
    if p.doomed:
        yield 2.0, ("end", p.pid)
    if p.suspended:
        yield 0.3, ("resume", p.pid)
        return
    yield 0.03, ("suspend_writing" if p.writing() else "suspend", p.pid)
    if not p.doomed:
        yield 0.01, ("die", p.pid)
    if isinstance(p, Trainer) and p.arena is not None:
        yield from _trainer_steps(world, p)
    if isinstance(p, Encoder) and p.can_step():
        yield 3.0, ("encoder", p.pid)
    if isinstance(p, Loader) and p.joined and not p.doomed:
        if p.left:
            yield 3.0, ("load", p.pid)
        elif not p.outbox:
            yield 3.0, ("end", p.pid)


def _trainer_steps(world: World, p: Trainer) -> Iterator[Weighted]:
    if (
        _has_a_reason_to_go_on(world, p)
        and p.iteration < _slowest(world, p.incarnation) + MOST_DRIFT
    ):
        yield 1.0, ("boundary", p.pid)
    if p.run is not None and not p.may_copy():
        # It waits for its slot for a moment only; what it said may have been lost or refused.
        if not p.waits():
            yield 0.5, ("not_given", p.pid)
        elif not world.bounds:
            yield 0.05, ("not_given", p.pid)
    elif p.run is not None:
        yield 2.0, ("copy", p.pid)
        if not world.bounds:
            yield (1.0 if p.revoked() else 0.02), ("abandon", p.pid)
        elif not p.revoked():
            yield 0.02, ("abandon", p.pid)


def _has_a_reason_to_go_on(world: World, p: Trainer) -> bool:
    """With bounds, iterations are not counted beyond the one that a permit is for."""
    if not world.bounds:
        return True
    cycle = None if world.incarnation is None else world.incarnation.cycle
    if cycle is None or world.incarnation is None or p.incarnation != world.incarnation.incarnation:
        return False
    if cycle.phase != CyclePhase.CAPTURING or p.last_permit == cycle.snapshot or p.run is not None:
        return False
    permit = None if p.arena is None else p.arena.permit
    seen = permit is not None and permit.snapshot == cycle.snapshot
    return seen or p.iteration < cycle.iteration


def _slowest(world: World, incarnation: int) -> int:
    trainers = [p for p in world.processes.values() if isinstance(p, Trainer) and p.alive]
    return min(p.iteration for p in trainers if p.incarnation == incarnation)


def _node_steps(world: World, node: Node) -> Iterator[Weighted]:
    name = node.name
    yield 0.008, ("lose", name)
    yield (0.008, ("cut", name)) if node.reachable else (0.2, ("heal", name))
    if not node.reachable or node.frozen:
        if not node.expired:
            yield 0.5, ("expire", name)
    if node.events and node.reachable:
        yield 4.0, ("event", name)
    for index in range(len(node.late_answers)):
        yield 0.5, ("late_answer", name, index)
    if node.repeats or node.late_answers or any(event[0] == "report" for event in node.events):
        yield 0.05, ("reset", name)
    if node.reports.waiting and node.working:
        yield 0.05, ("look", name)
    if node.outbox.unacked and node.working and node.reachable:
        yield 0.2, ("unheard", name)
        yield 1.0, ("heard", name)
    if node.machine is None:
        if node.reachable:
            yield 0.5, ("smp_start", name)
        return
    if node.frozen:
        yield 0.2, ("thaw", name)
        return
    yield 0.01, ("smp_crash", name, False)
    yield 0.005, ("smp_crash", name, True)
    yield 0.008, ("freeze", name)
    if node.late:
        yield 1.0, ("enforce", name)
    if node.deaths:
        yield 3.0, ("reap", name)
    if node.batch or node.answers or node.machine.effects:
        yield 4.0, ("flush", name)
        yield 1.0, ("effect", name)
    if not node.answers and not any(isinstance(e, tuple) for e in node.batch):
        yield from _request_steps(world, node)
    for shard, index in world.damaged_slots(node) if world.shape.damage else ():
        yield 1.0, ("scrub", name, shard, index)
    if world.shape.readers and _may_read(world):
        for snapshot in committed_on(node):
            yield 0.1, ("pin", name, snapshot)
    if world.shape.damage:
        for shard, index in world.committed_slots(name):
            yield 0.02, ("flip", name, shard, index)


def _request_steps(world: World, node: Node) -> Iterator[Weighted]:
    for incarnation, queue in node.requests.items():
        if queue and node.reachable:
            step = ("request", node.name, incarnation)
            yield 4.0, step
            if world.shape.coarse:
                yield 0.01, ("smp_crash_in", node.name, 1, step)
    for index in range(len(node.repeats)):
        yield 0.2, ("repeat", node.name, index)


def _may_read(world: World) -> bool:
    if world.bounds:
        return world.readers_seen < world.bounds.readers
    return len(world.readers) < 2


def committed_on(node: Node) -> list[SnapshotId]:
    """What a reader sees to be committed there, in the headers of all arenas."""
    seen = [
        {s.header.snapshot for s in arena.slots if s.header.state == SlotState.COMMITTED}
        for arena in node.arenas.values()
    ]
    found = set.intersection(*seen) if seen else set()
    return sorted(snapshot for snapshot in found if snapshot is not None)


def _job_steps(world: World) -> Iterator[Weighted]:
    incarnation = world.incarnation
    if incarnation is None or incarnation.failed:
        if (
            incarnation is None
            or not incarnation.refused
            or not world.bounds
            or _enough_nodes(world)
        ):
            yield 1.0, ("start_incarnation",)
    elif _trouble(world):
        yield (1.0 if incarnation.cycle is not None else 0.1), ("start_incarnation",)
    if incarnation is None:
        return
    yield 0.03, ("restart",)
    if any(q.answer is None and world.given_up(q.node) for q in incarnation.questions):
        yield 0.3, ("timeout",)
    if incarnation.cycle is not None and not incarnation.failed:
        yield from _cycle_steps(world, incarnation)


def _enough_nodes(world: World) -> bool:
    return sum(world.may_ask(node) for node in world.nodes.values()) >= len(world.active)


def _cycle_steps(world: World, incarnation: Incarnation) -> Iterator[Weighted]:
    assert incarnation.cycle is not None
    if incarnation.cycle.phase == CyclePhase.IDLE:
        more = not incarnation.cycle._last and incarnation.cycle._sequence < _permits(world)
        if world.may_protect(incarnation) and (more or not world.bounds):
            yield 3.0, ("protect",)
        elif world.crowded():
            if not world.bounds:
                yield 0.1, ("propose",)
                yield 0.02, ("propose_anyway",)
        elif more or not world.bounds:
            yield 3.0, ("propose",)
    elif incarnation.cycle.phase == CyclePhase.ENCODING:
        yield 0.05, ("give_up",)
    elif incarnation.cycle.phase == CyclePhase.CAPTURING and not world.bounds:
        yield 0.005, ("give_up",)
    whole = all(world.nodes[name].alive for name in world.active)
    between = not world.bounds or (incarnation.cycle.phase == CyclePhase.IDLE and whole)
    if world.shape.parity and between and world.may_start_world(incarnation):
        yield 0.5, ("world",)
    for name in incarnation.cycle.nodes:
        silent = not world.nodes[name].answering and world.nodes[name].up
        if silent and world.unanswered(name) is not None:
            yield 0.02, ("resend", name)


def _permits(world: World) -> int:
    return world.bounds.snapshots if world.bounds else 0


def _trouble(world: World) -> bool:
    """True if the supervisor knows of a reason to end this incarnation."""
    incarnation = world.incarnation
    assert incarnation is not None
    used = [world.nodes[name] for name in set(incarnation.places.values())]
    if any(not node.alive or (not node.answering and world.given_up(node.name)) for node in used):
        return True
    trainers = [p for p in world.processes.values() if isinstance(p, Trainer)]
    return any(p.incarnation == incarnation.incarnation and not p.alive for p in trainers)


def _disk_steps(world: World) -> Iterator[Weighted]:
    if not world.shape.disk:
        return
    yield (0.2, ("disk_back",)) if world.disk_away else (0.01, ("disk_away",))
    for index in range(len(world.orphans)):
        yield 0.05, ("orphan", index)
    incarnation = world.incarnation
    if incarnation is None or incarnation.cycle is None or incarnation.failed:
        return
    drain = incarnation.drain
    if drain is None:
        known = world.newest is not None and (
            world.judge.durable is None or world.newest > world.judge.durable
        )
        if known and (not world.bounds or world.drains_begun < world.bounds.drains):
            yield 0.3, ("drain",)
    elif drain.stage == "holding" and _answered(world, incarnation):
        yield 2.0, ("held",)
    elif drain.stage == "writing":
        yield 0.02, ("drain_dies",)
        for shard, name in incarnation.places.items():
            if shard not in drain.files and world.nodes[name].working:
                yield 0.5, ("write", shard)
    elif drain.stage in ("publishing", "tidying"):
        yield 0.5, ("publish",)
    elif drain.stage == "releasing" and _answered(world, incarnation):
        yield 2.0, ("released",)


def _answered(world: World, incarnation: Incarnation) -> bool:
    """Whether all have answered a drain's request, or some never will."""
    assert incarnation.drain is not None
    return incarnation.drain.waiting == 0 or not all(
        world.nodes[x].answering for x in incarnation.drain.nodes
    )
