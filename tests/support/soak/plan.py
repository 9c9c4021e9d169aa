"""Faults of a soak and their times: a function of the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

TRAINER, SMP, ENCODER = "trainer killed", "SMP killed", "encoder killed"
NODE, RETURNED = "node lost", "node lost, back with its memory"
PAUSED, FLIPPED = "paused and resumed", "bit flipped"
TRAINERS, HOST = "all trainers killed", "trainer and its host killed"
UNREACHABLE = "trainer killed, its host unreachable"
KINDS = (TRAINER, SMP, ENCODER, NODE, RETURNED, PAUSED, FLIPPED)

RESTARTS = (TRAINER, TRAINER, TRAINER, TRAINERS, HOST, UNREACHABLE, NODE)
"""Faults of restarts in a row, by how often they come.  Survivors restart in process, those that
were killed warm, behind a host that cannot be reached cold."""

QUIET_SHARE = 0.1
"""The first and the last part of the snapshots are left alone."""


@dataclass(frozen=True)
class SoakFault:
    """One fault, due once ``at`` snapshots have been taken.

    ``position`` is the place of its node among those that train, ``local`` the rank there.
    """

    at: int
    kind: str
    position: int
    local: int


def plan(
    seed: int, snapshots: int, faults: int, nodes: int, ranks_per_node: int
) -> tuple[SoakFault, ...]:
    """Faults at random times, in order; every kind comes as often as any other, but for one."""
    chance = random.Random(f"soak {seed}")
    kinds: list[str] = []
    while len(kinds) < faults:
        kinds += chance.sample(KINDS, len(KINDS))
    low, high = int(QUIET_SHARE * snapshots), int((1 - QUIET_SHARE) * snapshots)
    times = sorted(chance.randint(low, max(low, high)) for _ in range(faults))
    return tuple(
        SoakFault(at, kind, chance.randrange(nodes), chance.randrange(ranks_per_node))
        for at, kind in zip(times, kinds[:faults], strict=True)
    )


def restarts(seed: int, count: int, nodes: int, ranks_per_node: int) -> tuple[SoakFault, ...]:
    """Faults one after the other, as soon as the job could lose a node again."""
    chance = random.Random(f"restarts {seed}")
    return tuple(
        SoakFault(
            0, chance.choice(RESTARTS), chance.randrange(nodes), chance.randrange(ranks_per_node)
        )
        for _ in range(count)
    )
