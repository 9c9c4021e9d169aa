"""Random walks through a World, walks with a script, and the shortest way to a problem."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tests.protocol.model.enabled import enabled, is_fault
from tests.protocol.model.judge import Violation
from tests.protocol.model.shape import Shape, Step
from tests.protocol.model.world import World

STEPS = 1500
MOST_STEPS = 10_000
"""To wait for something in a walk with a script."""
WEATHER = (0.0, 0.1, 0.3, 1.0)
"""How often faults happen, for a hundred steps each: without calm nothing gets protected."""


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
        possible = enabled(world)
        weights = [
            weight * (weather if is_fault(step) else 1.0) * bias.get(str(step[0]), 1.0)
            for weight, step in possible
        ]
        taken.append(choose.choices([step for _, step in possible], weights)[0])
        problem = perform(world, taken[-1])
        if problem:
            return taken, world, problem
    return taken, world, ""


def perform(world: World, step: Step) -> str:
    """Take a step; what went wrong, or nothing."""
    try:
        world.perform(step)
    except (Violation, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass(frozen=True)
class Until:
    """Random steps without faults until something holds; ``bias`` as in walk."""

    holds: Callable[[World], bool]
    bias: Mapping[str, float] = field(default_factory=dict)


Part = Until | Step | Callable[[World], Step]
"""Of a script: wait for something, or take a step, which may depend on the world."""


def directed(shape: Shape, seed: int, script: Iterable[Part]) -> str:
    """Given steps at given moments, for what random walks meet too seldom; what went wrong."""
    choose, world = random.Random(seed), World(shape)
    for part in script:
        if isinstance(part, Until):
            problem = _go_on(world, choose, part)
        else:
            problem = perform(world, part(world) if callable(part) else part)
        if problem:
            return problem
    return ""


def _go_on(world: World, choose: random.Random, until: Until) -> str:
    for _ in range(MOST_STEPS):
        if until.holds(world):
            return ""
        calm = [(w * until.bias.get(str(s[0]), 1.0), s) for w, s in enabled(world)]
        calm = [(weight, step) for weight, step in calm if not is_fault(step)]
        problem = perform(world, choose.choices([s for _, s in calm], [w for w, _ in calm])[0])
        if problem:
            return problem
    return f"never came to what was waited for in {MOST_STEPS} steps"


def replay(shape: Shape, steps: Iterable[Step]) -> str:
    """Take those of the steps that are possible; what went wrong, or empty."""
    world = World(shape)
    for step in steps:
        if step in [possible for _, possible in enabled(world)]:
            problem = perform(world, step)
            if problem:
                return problem
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


def explain(shape: Shape, steps: list[Step]) -> str:
    """The shortest way found to the problem, for the message of a failed test."""
    short = shorten(shape, steps)
    lines = "\n".join(map(str, short))
    return f"{replay(shape, short)}\n{shape}, {len(short)} steps:\n{lines}"
