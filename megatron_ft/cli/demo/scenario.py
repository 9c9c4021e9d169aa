"""Which faults strike, whom and when: a pure function of a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """What is killed."""

    TRAINER = "trainer"
    NODE = "node"
    TRAINER_AND_ENCODER = "trainer and encoder"


@dataclass(frozen=True)
class Fault:
    """One fault.

    It strikes once rank 0 has finished ``iteration`` and a further ``fraction`` of an
    iteration's time has passed, and not before the present life has a protected commit.
    ``positions`` are places in the list of active nodes, ``local_rank`` a trainer there.
    """

    kind: FaultKind
    iteration: int
    fraction: float
    positions: tuple[int, ...]
    local_rank: int = 0


# Shares of all iterations within which each fault strikes.  Far enough apart that a life trains
# and commits in between, and the last one early enough that the job goes on for a while after it.
_WINDOWS = ((0.20, 0.30), (0.45, 0.55), (0.70, 0.80))
_KINDS = (FaultKind.TRAINER, FaultKind.NODE, FaultKind.TRAINER_AND_ENCODER)


def plan_faults(
    seed: int, iterations: int, nodes: int, ranks_per_node: int = 1, lose: int = 1
) -> tuple[Fault, ...]:
    """The demo's three faults: a trainer, then ``lose`` nodes at once, then trainer and encoder.

    The same arguments give the same faults on every machine.  ValueError if more nodes are
    to be lost than there are.
    """
    if not 1 <= lose <= nodes:
        raise ValueError(f"{lose} of {nodes} nodes cannot be lost")
    chance = random.Random(f"megatron-ft demo {seed}")
    faults = []
    for kind, (earliest, latest) in zip(_KINDS, _WINDOWS, strict=True):
        victims = lose if kind is FaultKind.NODE else 1
        faults.append(
            Fault(
                kind=kind,
                iteration=chance.randint(round(earliest * iterations), round(latest * iterations)),
                # Not at the very edges, where the next iteration's start hides the difference.
                fraction=round(chance.uniform(0.1, 0.9), 3),
                positions=tuple(sorted(chance.sample(range(nodes), victims))),
                local_rank=chance.randrange(ranks_per_node),
            )
        )
    return tuple(faults)
