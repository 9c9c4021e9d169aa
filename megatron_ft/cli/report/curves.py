"""Curves of a job's progress over the seconds since its beginning, from its events.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import CommittedEvent, EndedEvent, TrainingEvent
from megatron_ft.supervisor.ledger import timeline

Point = tuple[float, float]
"""Seconds since the job's beginning, and a value."""

Curve = list[list[Point]]
"""Pieces of a curve: nothing is known between one and the next."""


@dataclass
class Curves:
    """Progress of a job.

    ``reached`` are iterations that were ended by then, ``committed`` the newest committed one,
    ``pace`` the mean seconds of an iteration between two commits.  ``exposed`` has the seconds
    of training since the newest snapshot of a level, or since training began: what a fault takes.
    """

    reached: Curve = field(default_factory=list)
    committed: list[Point] = field(default_factory=list)
    pace: list[Point] = field(default_factory=list)
    exposed: dict[str, Curve] = field(default_factory=dict)


def curves(events: Sequence[LoggedEvent]) -> Curves:
    """The curves of a job's events."""
    found = Curves()
    levels = {e.facts.level for e in events if isinstance(e.facts, CommittedEvent)}
    for name in ("local", "protected"):
        if name in levels:
            # A protected snapshot is one that survives the end of a process, too.
            counted: set[str] = {name, "protected"}
            found.exposed[name] = _exposed(events, counted)
    for at, event in timeline(events):
        facts = event.facts
        if isinstance(facts, TrainingEvent):
            found.reached.append([(at, facts.iteration)])
        elif isinstance(facts, CommittedEvent):
            iteration = facts.iteration
            newest = found.committed[-1][1] if found.committed else iteration
            found.committed += [(at, newest), (at, iteration)]
            if found.reached:
                _advance(found, at, iteration)
        elif isinstance(facts, EndedEvent) and found.reached and facts.reached >= 0:
            last = found.reached[-1]
            # Recorded a little later than it happens.
            last.append((max(last[-1][0], at - facts.ago), facts.reached))
    return found


def _advance(found: Curves, at: float, iteration: int) -> None:
    before, begun = found.reached[-1][-1]
    if iteration > begun and at > before:
        found.pace.append(((before + at) / 2, (at - before) / (iteration - begun)))
        found.reached[-1].append((at, iteration))


def _exposed(events: Sequence[LoggedEvent], levels: set[str]) -> Curve:
    pieces: Curve = []
    since: float | None = None
    first: dict[int, float] = {}
    """Time of an iteration's first commit; becoming protected later makes it no newer."""
    for at, event in timeline(events):
        facts = event.facts
        if isinstance(facts, TrainingEvent):
            pieces.append([(at, 0.0)])
            since, first = at, {}
        elif since is None:
            continue
        elif isinstance(facts, CommittedEvent):
            made = first.setdefault(facts.iteration, at)
            if facts.level in levels:
                pieces[-1] += [(at, at - since), (at, at - max(since, made))]
                since = max(since, made)
        elif isinstance(facts, EndedEvent):
            stop = max(since, at - facts.ago)
            pieces[-1].append((stop, stop - since))
            since = None
    return pieces


def thinned(curve: Curve, wall: float, columns: int) -> Curve:
    """The curve, or where it has very many points its lowest and highest of each column."""
    points = [point for piece in curve for point in piece]
    if len(points) <= 4 * columns:
        return curve
    kept: dict[int, list[Point]] = {}
    for point in points:
        kept.setdefault(int(point[0] / wall * columns), []).append(point)
    extremes = ({min(found, key=_value), max(found, key=_value)} for found in kept.values())
    return [[point for pair in extremes for point in sorted(pair)]]


def _value(point: Point) -> float:
    return point[1]
