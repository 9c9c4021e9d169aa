"""The demo's three faults: which strike whom and when, and the recovery from each.

Plans and recoveries are pure: of a seed, and of what was recorded while the job ran.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron_ft.cli.chaos.trace import TraceLine
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import (
    EndedEvent,
    RecoveredEvent,
    RestoringEvent,
    TrainingEvent,
)
from megatron_ft.supervisor.heartbeats import PARTS

Traces = Mapping[int, Sequence[TraceLine]]
"""Ranks to all their lines."""


class DemoVictim(Enum):
    """Processes that are killed."""

    TRAINER = "trainer"
    NODE = "node"
    TRAINER_AND_ENCODER = "trainer and encoder"


@dataclass(frozen=True)
class DemoFault:
    """One fault.

    It strikes once rank 0 has finished ``iteration`` and a further ``fraction`` of an
    iteration's time has passed, and not before the present incarnation has a protected commit.
    ``positions`` are places in the list of active nodes, ``local_rank`` a trainer there.
    """

    kind: DemoVictim
    iteration: int
    fraction: float
    positions: tuple[int, ...]
    local_rank: int = 0


STOPPED = 0.0
"""As ``fraction`` of a DemoFault: the job was stopped when it struck."""


# Shares of all iterations within which each fault strikes.  Far enough apart that an incarnation
# trains and commits in between, and the last one early enough that the job trains for a while
# after it.
_WINDOWS = ((0.20, 0.30), (0.45, 0.55), (0.70, 0.80))


def plan_faults(
    seed: int, iterations: int, nodes: int, ranks_per_node: int = 1, lose: int = 1
) -> tuple[DemoFault, ...]:
    """The demo's three faults: a trainer, then ``lose`` nodes at once, then trainer and encoder.

    The same arguments give the same faults on every machine.  ValueError if more nodes are
    to be lost than there are.
    """
    if not 1 <= lose <= nodes:
        raise ValueError(f"{lose} of {nodes} nodes cannot be lost")
    chance = random.Random(f"megatron-ft demo {seed}")
    faults = []
    for kind, (earliest, latest) in zip(DemoVictim, _WINDOWS, strict=True):
        victims = lose if kind is DemoVictim.NODE else 1
        faults.append(
            DemoFault(
                kind=kind,
                iteration=chance.randint(round(earliest * iterations), round(latest * iterations)),
                # Not at the very edges, where the next iteration's start hides the difference.
                fraction=round(chance.uniform(0.1, 0.9), 3),
                positions=tuple(sorted(chance.sample(range(nodes), victims))),
                local_rank=chance.randrange(ranks_per_node),
            )
        )
    return tuple(faults)


@dataclass(frozen=True)
class DemoStrike:
    """One fault as it was carried out on ``victim``; ``during`` is the iteration under way."""

    fault: DemoFault
    victim: str
    incarnation: int
    during: int
    monotonic: float
    wall: float


@dataclass(frozen=True, kw_only=True)
class DemoRecovery:
    """One fault and the recovery from it.  All times are seconds; None where it never came.

    ``seconds_to_first_iteration`` runs from the strike to the end of the first iteration
    after the restore.  ``parts`` and ``starts`` (how the ranks came up) are those of the job's
    event; its clock begins when the fault is noticed, ``detect`` after the strike.
    """

    victim: str
    kind: str
    during: int
    fraction: float
    detect: float | None
    source: str | None = None
    restored_iteration: int | None = None
    iterations_lost: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    starts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seconds_to_first_iteration: float | None = None


# Events by which the supervisor shows that it has noticed a death.
_DETECTIONS = (
    "trainer_died",
    "silent",
    "smp_restarted",
    "world_ended",
    "node_lost",
    EndedEvent.kind,
)


def _noticed(event: LoggedEvent) -> float:
    """The time of a detection.  The end of an incarnation is reported when its trainers are dead,
    and says how long ago it was; the clock of the parts begins there."""
    return event.at - event.facts.ago if isinstance(event.facts, EndedEvent) else event.at


def recoveries(
    strikes: Sequence[DemoStrike], events: Sequence[LoggedEvent], traces: Traces
) -> list[DemoRecovery]:
    ends = [strike.monotonic for strike in strikes[1:]] + [float("inf")]
    return [
        _recovery(strike, [e for e in events if strike.monotonic <= e.at < until], traces)
        for strike, until in zip(strikes, ends, strict=False)
    ]


def _recovery(strike: DemoStrike, events: Sequence[LoggedEvent], traces: Traces) -> DemoRecovery:
    detections = [_noticed(e) - strike.monotonic for e in events if e.kind in _DETECTIONS]
    noticed = DemoRecovery(
        victim=strike.victim,
        kind=strike.fault.kind.value,
        during=strike.during,
        fraction=strike.fault.fraction,
        detect=min(detections, default=None),
    )
    # Several starts in a row when something failed in between: the last one counts.
    incarnations = [e.incarnation for e in events if isinstance(e.facts, TrainingEvent)]
    if not incarnations or incarnations[-1] <= strike.incarnation:
        return noticed
    newest = [e.facts for e in events if e.incarnation == incarnations[-1]]
    measured = next((one for one in newest if isinstance(one, RecoveredEvent)), None)
    lines = [line for rank in traces.values() for line in rank]
    again = [line for line in lines if line.incarnation == incarnations[-1]]
    reached = max(line.iteration for line in lines if line.incarnation < incarnations[-1])
    restored = next((one for one in newest if isinstance(one, RestoringEvent)), None)
    back_to = restored.iteration if restored else 0
    first = min((line.iteration for line in again), default=-1)
    # The last rank's end is that of the iteration.
    ends = [line.time - strike.wall for line in again if line.iteration == first]
    done = max(ends) if ends else None
    return dataclasses.replace(
        noticed,
        source=restored.source if restored else None,
        restored_iteration=back_to if restored else None,
        iterations_lost=reached - back_to,
        parts={} if measured is None else {name: getattr(measured, name) for name in PARTS},
        starts={} if measured is None else measured.starts,
        seconds_to_first_iteration=done,
    )
