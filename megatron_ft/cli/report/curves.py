"""Curves of a job's progress over the seconds since its beginning, from its events.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ft.supervisor.event_log import RecordedEvent
from megatron_ft.supervisor.ledger import ENDED, timeline

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


def curves(events: Sequence[RecordedEvent]) -> Curves:
    """The curves of a job's events."""
    found = Curves()
    levels = {event.get("level") for event in events if event["kind"] == "committed"}
    for name in ("local", "protected"):
        if name in levels:
            # A protected snapshot is one that survives the end of a process, too.
            counted = {name, "protected"}
            found.exposed[name] = _exposed(events, counted)
    for at, event in timeline(events):
        kind, iteration = event["kind"], event.get("iteration", -1)
        if kind == "training":
            found.reached.append([(at, iteration)])
        elif kind == "committed":
            newest = found.committed[-1][1] if found.committed else iteration
            found.committed += [(at, newest), (at, iteration)]
            if found.reached:
                _advance(found, at, iteration)
        elif kind == ENDED and found.reached and event.get("reached", -1) >= 0:
            last = found.reached[-1]
            # Recorded a little later than it happens.
            last.append((max(last[-1][0], at - event.get("ago", 0.0)), event["reached"]))
    return found


def _advance(found: Curves, at: float, iteration: int) -> None:
    before, begun = found.reached[-1][-1]
    if iteration > begun and at > before:
        found.pace.append(((before + at) / 2, (at - before) / (iteration - begun)))
        found.reached[-1].append((at, iteration))


def _exposed(events: Sequence[RecordedEvent], levels: set[str]) -> Curve:
    pieces: Curve = []
    since: float | None = None
    first: dict[int, float] = {}
    """Time of an iteration's first commit; becoming protected later makes it no newer."""
    for at, event in timeline(events):
        if event["kind"] == "training":
            pieces.append([(at, 0.0)])
            since, first = at, {}
        elif since is None:
            continue
        elif event["kind"] == "committed":
            made = first.setdefault(event.get("iteration", -1), at)
            if event.get("level") in levels:
                pieces[-1] += [(at, at - since), (at, at - max(since, made))]
                since = max(since, made)
        elif event["kind"] == ENDED:
            stop = max(since, at - event.get("ago", 0.0))
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
