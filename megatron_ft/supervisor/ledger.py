"""The ledger of a job: every second of its wall time in exactly one category.  Pure.

A job's time runs from the start of its first supervisor to its last event.  It is cut where events
say that the job has begun to do something else; so the categories add up to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from megatron_ft.supervisor import ends
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import (
    AutopsyEvent,
    BackoffEvent,
    CaughtUpEvent,
    EndedEvent,
    NodeLostEvent,
    RecoveredEvent,
    RestoringEvent,
    SnapshotEvent,
    TrainingEvent,
)

PRODUCTIVE, REDONE, STALL = "productive", "redone", "stall"
DETECT, DECIDE, REBUILD, START = "detect", "decide", "rebuild", "start"
IDLE, HOLD, QUEUE = "idle", "hold", "queue"

CATEGORIES: Mapping[str, str] = {
    PRODUCTIVE: "iterations that were made for the first time",
    REDONE: "iterations that were made before, and lost",
    STALL: "training waited for a snapshot",
    DETECT: "a fault had happened, and nobody knew",
    DECIDE: "trainers were ended, and what to restore was decided",
    REBUILD: "memory was made complete",
    START: "trainers started, connected, built the model and restored",
    IDLE: "waiting before the next start, after repeated failures",
    HOLD: "waiting for replacement hosts",
    QUEUE: "no supervisor ran",
}

SUPERVISING = "supervising"
"""Kind of the event that a supervisor has begun."""

_BEGINS = {
    SUPERVISING: START,
    EndedEvent.kind: DECIDE,
    BackoffEvent.kind: IDLE,
    "holding": HOLD,
    RestoringEvent.kind: REBUILD,
    "trainers_started": START,
    TrainingEvent.kind: PRODUCTIVE,
    CaughtUpEvent.kind: PRODUCTIVE,
}
"""Categories that events begin."""

NODE = "node loss"
_CLASSES = (
    (ends.NodeLost.words, NODE),
    (ends.Hung.words, "hang"),
    (ends.TrainerFailed.killed, "signal"),
    (ends.TrainerFailed.exited, "trainer exit"),
    (ends.RebuildFailed.words, "corrupt memory"),
    (ends.LoadFailed.words, "storage"),
    (ends.NoRoom.words, "memory"),
    (ends.NotRegistered.words, "launcher"),
    (ends.SmpLost.words, "daemon"),
)
"""Incidents by the begin of the cause that their event has."""


class Span(NamedTuple):
    """A stretch of the job's time, in seconds since its beginning."""

    category: str
    start: float
    stop: float
    incarnation: int

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass
class Incident:
    """The unplanned end of an incarnation, and what it cost.

    ``at`` is in seconds since the job's beginning, ``source`` is where the restored bytes came
    from, ``lost`` how many iterations were made again, ``down`` the seconds until training
    continued, ``redone`` those in which it made again what was lost.
    """

    at: float
    kind: str
    text: str
    incarnation: int
    node: str = ""
    iteration: int = field(init=False, default=-1)
    source: str = field(init=False, default="")
    lost: int = field(init=False, default=0)
    down: float = field(init=False, default=0.0)
    redone: float = field(init=False, default=0.0)


@dataclass
class Ledger:
    """Seconds of wall time by category and incarnation, and the incidents among them."""

    spans: list[Span] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """Times of commits, in order, and the seconds for which each snapshot had held training."""

    @property
    def wall(self) -> float:
        """Seconds from the first event to the last."""
        return self.spans[-1].stop - self.spans[0].start if self.spans else 0.0

    def seconds(self, incarnation: int | None = None) -> dict[str, float]:
        """Seconds by category, of one incarnation or of all."""
        sums = dict.fromkeys(CATEGORIES, 0.0)
        for span in self.spans:
            if incarnation in (None, span.incarnation):
                held = self._stalled(span)
                sums[span.category] += span.seconds - held
                sums[STALL] += held
        return sums

    def _stalled(self, span: Span) -> float:
        if span.category not in (PRODUCTIVE, REDONE):
            return 0.0
        first, end = (bisect_right(self.stalls, (at, inf)) for at in (span.start, span.stop))
        return min(sum(held for _, held in self.stalls[first:end]), span.seconds)

    @property
    def ettr(self) -> float:
        """Productive share of wall time; 0 for a job of no time."""
        return self.seconds()[PRODUCTIVE] / self.wall if self.wall else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, seconds to the millisecond."""
        numbers = sorted({span.incarnation for span in self.spans})
        return {
            "wall": round(self.wall, 3),
            "ettr": round(self.ettr, 4),
            "seconds": _rounded(self.seconds()),
            "incarnations": {str(n): _rounded(self.seconds(n)) for n in numbers},
            "incidents": [
                {k: round(v, 3) if isinstance(v, float) else v for k, v in vars(one).items()}
                for one in self.incidents
            ],
        }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def ledger(events: Sequence[LoggedEvent]) -> Ledger:
    writer = LedgerWriter()
    for at, event in timeline(events):
        writer.take(at, event)
    return writer.ledger


def timeline(events: Iterable[LoggedEvent]) -> Iterator[tuple[float, LoggedEvent]]:
    """Events with the seconds since the first one, which never go back.

    Within a supervisor its monotonic clock counts, between two of them the wall clock: one that
    was set back in between makes the gap 0.
    """
    origin: float | None = None
    wall = monotonic = last = 0.0
    for event in events:
        if origin is None:
            origin = event.time
        if event.kind == SUPERVISING or not monotonic:
            wall, monotonic = max(event.time - origin, last), event.at
        last = max(last, wall + event.at - monotonic)
        yield last, event


class LedgerWriter:
    """Cuts the time of a job into spans, event by event."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._category, self._since, self._incarnation = START, 0.0, 0
        self._reached, self._wait, self._supervised = -1, 0.0, False
        self._trained: int | None = None
        """Index of the span of training that ended last."""
        self._open: Incident | None = None
        """The incident after which training has not continued yet."""
        self._behind: Incident | None = None
        """The one after which training makes again what was lost; others never change."""

    def take(self, at: float, event: LoggedEvent) -> None:
        """Account for the time up to an event."""
        facts = event.facts
        if event.kind == SUPERVISING:
            self._category = QUEUE if self._supervised else START
            self._supervised = True
        begins = _BEGINS.get(event.kind)
        if isinstance(facts, TrainingEvent) and facts.iteration < self._reached:
            begins = REDONE
        now = at
        if isinstance(facts, CaughtUpEvent | EndedEvent):
            # Both are recorded a little later than they happen.
            at = max(self._since, at - facts.ago)
        if self._category == IDLE and begins is not None:
            at = self._end_wait(at)
        self._cut(at, event, begins or self._category)
        self._note(at, event)
        self._span(now)

    def _end_wait(self, at: float) -> float:
        """A wait has no event at its end."""
        waited = min(at, self._since + self._wait)
        self._span(waited)
        self._category = DECIDE
        return at

    def _cut(self, at: float, event: LoggedEvent, category: str) -> None:
        self._span(at)
        self._category, self._incarnation = category, event.incarnation

    def _span(self, stop: float) -> None:
        spans = self.ledger.spans
        span = Span(self._category, self._since, stop, self._incarnation)
        last = spans[-1] if spans else None
        if last is not None and (last.category, last.incarnation) == (span.category, span[3]):
            spans[-1] = last._replace(stop=stop)
        elif span.seconds or not spans:
            spans.append(span)
        self._since = stop

    def _note(self, at: float, event: LoggedEvent) -> None:
        """Keep what later events are judged by."""
        facts, one = event.facts, self._open
        if isinstance(facts, SnapshotEvent):
            self.ledger.stalls.append((at, facts.stall))
        elif isinstance(facts, BackoffEvent):
            self._wait = facts.seconds
        elif isinstance(facts, EndedEvent):
            self._reached = max(self._reached, facts.reached)
            self._trained, self._behind = len(self.ledger.spans) - 1, None
            if not facts.asked:
                self._open = _incident(at, event, facts)
                self.ledger.incidents.append(self._open)
        elif isinstance(facts, CaughtUpEvent) and self._behind is not None:
            self._behind.redone, self._behind = self.ledger.spans[-1].seconds, None
        elif one is not None:
            self._note_recovery(one, at, event)
        if isinstance(facts, RecoveredEvent) and self._trained is not None:
            self._move_detection(facts.detect)

    def _note_recovery(self, one: Incident, at: float, event: LoggedEvent) -> None:
        """Complete an incident until training continues."""
        facts = event.facts
        if isinstance(facts, AutopsyEvent) and facts.rank >= 0:
            one.kind, one.node, one.text = facts.verdict, facts.node, event.text
        elif isinstance(facts, NodeLostEvent):
            # Its processes end one after the other; any of them may be the first to be missed.
            one.kind, one.node = NODE, facts.node
        elif isinstance(facts, RestoringEvent):
            one.iteration, one.source = facts.iteration, facts.source
            one.lost = facts.iterations_lost or 0
        elif isinstance(facts, TrainingEvent):
            one.down = at - one.at
            self._open, self._behind = None, one

    def _move_detection(self, seconds: float) -> None:
        """The last seconds of the training that a fault ended were none: nobody knew of it."""
        spans, index = self.ledger.spans, self._trained
        self._trained = None
        if index is None or not seconds or spans[index].category not in (PRODUCTIVE, REDONE):
            return
        span = spans[index]
        known = max(span.start, span.stop - seconds)
        spans[index : index + 1] = [
            span._replace(stop=known),
            Span(DETECT, known, span.stop, span.incarnation),
        ]


def _incident(at: float, event: LoggedEvent, ended: EndedEvent) -> Incident:
    cause = ended.cause
    kind = next((name for begin, name in _CLASSES if cause.startswith(begin)), cause or "other")
    return Incident(at, kind, event.text, event.incarnation, ended.node)
