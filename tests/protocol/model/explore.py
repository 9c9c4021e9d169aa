"""All runs of a small job within bounds: depth first, each state once.

A state is expanded again only if it was reached with fewer faults (or delays) than before.
Without ``delays`` every order of steps is taken.  With ``delays`` d, steps are taken in one
fixed order but for at most d times in a run, at each of which any other possible step is
taken instead; faults may strike everywhere in both cases.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from megatron_ft.supervisor.cycle import CyclePhase
from tests.protocol.model.canonical import key, memory_key
from tests.protocol.model.clone import clone
from tests.protocol.model.enabled import enabled, is_fault
from tests.protocol.model.judge import Violation
from tests.protocol.model.shape import Bounds, Shape, Step
from tests.protocol.model.world import World


@dataclass(frozen=True)
class Limits:
    """How far to go.  ``kinds`` of faults (all, if empty), ``delays`` None for every order."""

    faults: int = 1
    delays: int | None = None
    kinds: Collection[str] = ()
    seconds: float = 0.0
    states: int = 0


@dataclass
class Result:
    """What was found.  ``complete`` says that nothing within the limits was left out."""

    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    complete: bool = True
    problem: str = ""
    path: list[Step] = field(default_factory=list)
    stuck: int = 0
    ends: int = 0
    deepest: int = 0


class ExploredWorld(World):
    """A World that judges each state of memory once, and not at every step that leads to it."""

    judged: set[int]

    def check(self) -> None:
        found = memory_key(self)
        if found not in self.judged:
            super().check()
            self.judged.add(found)


@dataclass
class _Frame:
    """A state on the path: what may still be tried from it, and what that costs."""

    world: World
    number: int
    faults: int
    delays: int
    steps: Iterator[tuple[Step, int, int]]
    by: Step = ()


class Explorer:
    """One exploration; ``run`` it once."""

    def __init__(self, shape: Shape, bounds: Bounds, limits: Limits) -> None:
        assert shape.coarse, "only coarse worlds store what they have decided at once"
        self.shape, self.bounds, self.limits = shape, bounds, limits
        self.result = Result()
        self.numbers: dict[int, int] = {}
        self.costs: list[list[tuple[int, int]]] = []
        self.edges_from, self.edges_to = array("I"), array("I")
        self.goals = bytearray()

    def run(self) -> Result:
        started = time.monotonic()
        world = ExploredWorld(self.shape, self.bounds)
        world.judged = set()
        stack = [self._frame(world, self._number(world), 0, 0, ())]
        self.costs[0].append((0, 0))
        try:
            self._search(stack, started)
        except Violation as error:
            self.result.problem = str(error)
            self.result.path = [frame.by for frame in stack[1:]] + self.result.path
        self.result.states = len(self.costs)
        if self.result.complete and not self.result.problem:
            self._find_stuck()
        self.result.seconds = time.monotonic() - started
        return self.result

    def _search(self, stack: list[_Frame], started: float) -> None:
        limits, result = self.limits, self.result
        while stack:
            frame = stack[-1]
            result.deepest = max(result.deepest, len(stack))
            following = next(frame.steps, None)
            if following is None:
                stack.pop()
                continue
            step, faults, delays = following
            if (
                limits.states
                and len(self.costs) >= limits.states
                or (limits.seconds and time.monotonic() - started > limits.seconds)
            ):
                result.complete = False
                return
            assert len(stack) < MOST_STEPS, [frame.by for frame in stack[-60:]]
            world = clone(frame.world)
            result.path = [step]
            world.perform(step)
            result.path = []
            result.transitions += 1
            number = self._number(world)
            if not is_fault(step):
                self.edges_from.append(frame.number)
                self.edges_to.append(number)
            if not world.over and self._cheaper(number, (faults, delays)):
                stack.append(self._frame(world, number, faults, delays, step))

    def _number(self, world: World) -> int:
        found = key(world)
        number = self.numbers.get(found)
        if number is None:
            number = self.numbers[found] = len(self.costs)
            self.costs.append([])
            self.goals.append(is_goal(world))
        return number

    def _cheaper(self, number: int, cost: tuple[int, int]) -> bool:
        """Whether a state was not reached yet with as few faults and delays; it is now."""
        known = self.costs[number]
        if any(f <= cost[0] and d <= cost[1] for f, d in known):
            return False
        known[:] = [(f, d) for f, d in known if f < cost[0] or d < cost[1]]
        known.append(cost)
        return True

    def _frame(self, world: World, number: int, faults: int, delays: int, by: Step) -> _Frame:
        steps = self._steps(world, faults, delays)
        if not steps:
            self.result.ends += 1
        return _Frame(world, number, faults, delays, iter(steps), by)

    def _steps(self, world: World, faults: int, delays: int) -> list[tuple[Step, int, int]]:
        limits = self.limits
        possible = [step for _, step in enabled(world)]
        usual = [step for step in possible if not is_fault(step)]
        if limits.delays is None:
            found = [(step, faults, 0) for step in usual]
        else:
            usual.sort(key=_patience)
            found = [(step, faults, delays + bool(n)) for n, step in enumerate(usual)]
            found = [one for one in found if one[2] <= limits.delays]
        if faults < limits.faults:
            kinds = limits.kinds
            found += [
                (step, faults + 1, delays)
                for step in possible
                if is_fault(step) and (not kinds or step[0] in kinds)
            ]
        return found

    def _find_stuck(self) -> None:
        """States from which no run without further faults comes to a decision."""
        before: list[list[int]] = [[] for _ in self.costs]
        for source, target in zip(self.edges_from, self.edges_to, strict=True):
            before[target].append(source)
        reached = bytearray(self.goals)
        work = [number for number, goal in enumerate(self.goals) if goal]
        while work:
            for source in before[work.pop()]:
                if not reached[source]:
                    reached[source] = True
                    work.append(source)
        self.result.stuck = len(reached) - sum(reached)
        if self.result.stuck:
            self.result.problem = f"{self.result.stuck} states lead to no commit and no refusal"
            self.stuck = [number for number, ok in enumerate(reached) if not ok]


MOST_STEPS = 1000
"""A longer run than this goes in circles that the key does not see."""
ORDER = (
    (
        "request",
        "local",
        "event",
        "reap",
        "end",
        "encoder",
        "load",
        "copy",
        "not_given",
        "write",
        "held",
    ),
    (
        "boundary",
        "publish",
        "released",
        "scrub",
        "mend",
        "read",
        "world",
        "protect",
        "propose",
        "drain",
    ),
    ("start_incarnation", "smp_start", "enforce", "expire", "timeout", "pin", "orphan"),
    ("resume", "thaw", "heal", "disk_back"),
)
"""Which steps come first where the order is fixed: what is under way, then what is new."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def _patience(step: Step) -> tuple[int, int, str]:
    rank = RANK[str(step[0])]
    return rank, ORDER[rank].index(str(step[0])), str(step[1:])


def is_goal(world: World) -> bool:
    """Whether a snapshot was decided in this incarnation, or the job has stopped and said why."""
    incarnation = world.incarnation
    if world.over or (incarnation is not None and incarnation.refused):
        return True
    if incarnation is None or incarnation.cycle is None or incarnation.failed:
        return False
    return incarnation.decided > 0 and incarnation.cycle.phase == CyclePhase.IDLE
