"""The events of a job on disk: one line of JSON each, across incarnations and supervisors.

Each line has ``time`` (seconds since 1970), ``at`` (monotonic seconds of that machine), ``job``,
``incarnation``, ``kind`` and ``text``, and beside these the event's own fields.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.errors import UNREADABLE
from megatron_ft.supervisor.events import FACTS, Count, EventFacts, JobEvent, Seconds

if TYPE_CHECKING:
    from megatron_ft.supervisor.fleet import Fleet

log = logging.getLogger(__name__)

EVENTS = "events.jsonl"
"""Name of the file in a job's state folder."""

_MOST_WAITING = 10_000
_LARGEST_FILE = 1 << 30


class EventLog:
    """Appends events to a file, each in one write, so that a killed supervisor loses none.

    A disk that takes no more never ends the job: lines wait in memory and are tried again with the
    next event, the newest 10,000 of them.
    """

    def __init__(self, path: Path, job: str = "") -> None:
        self._path, self._job = path, job
        self._incarnation: Callable[[], int] = lambda: 0
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        # A line before may have no end: a supervisor died in its write, or the disk was full.
        self._torn = self._failed = False

    def follow(self, fleet: Fleet) -> None:
        self._incarnation = lambda: fleet.incarnation
        fleet.observers.subscribe(self.record)

    def record(self, event: JobEvent) -> None:
        """Record one event; a failure is logged once."""
        self._waiting.append(line_of(event, self._job, self._incarnation()))
        try:
            self._write()
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("%s takes no events for now (%s); they wait", self._path, error)
            self._failed = True

    def _write(self) -> None:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        while self._waiting:
            line = b"\n" * self._torn + self._waiting[0]
            self._torn = True
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._torn = False
            self._waiting.popleft()


def line_of(event: JobEvent, job: str, incarnation: int) -> bytes:
    line = {
        "time": round(time.time(), 3),
        "at": round(event.monotonic, 4),
        "job": job,
        "incarnation": incarnation,
        "kind": event.kind,
        "text": event.text,
    }
    assert not line.keys() & event.fields.keys(), f"{event.kind} has a field of every event"
    return json.dumps({**line, **event.fields}, default=str).encode() + b"\n"


class LoggedEvent(NamedTuple):
    """An event of the file: the fields of every line, and the facts of its kind, if it has any."""

    time: float
    at: float
    job: str
    incarnation: int
    kind: str
    text: str
    facts: EventFacts | None


class LoggedEvents(NamedTuple):
    """Events in the order in which they were recorded, and how many lines were none."""

    events: Sequence[LoggedEvent]
    foreign: int


def read_events(path: Path) -> LoggedEvents:
    """The events of the newest job in a file; none if there is no file.

    Torn and foreign lines are left out.
    """
    try:
        raw = private_files.read_file(path, _LARGEST_FILE)
    except FileNotFoundError:
        return LoggedEvents((), 0)
    found = [_event(line) for line in raw.split(b"\n") if line]
    events = [event for event in found if event is not None]
    return LoggedEvents(
        [event for event in events if event.job == events[-1].job], len(found) - len(events)
    )


def event_of(line: Mapping[str, Any]) -> LoggedEvent:
    """The event of a line; msgspec.ValidationError for a value that cannot be."""
    common = msgspec.convert(line, _Common)
    kind = FACTS.get(common.kind)
    facts = None if kind is None else msgspec.convert(line, kind)
    return LoggedEvent(**msgspec.structs.asdict(common), facts=facts)


class _Common(msgspec.Struct, kw_only=True):
    """The fields of every line."""

    time: Seconds
    at: Seconds
    job: str
    incarnation: Count = 0
    kind: str
    text: str


def _event(line: bytes) -> LoggedEvent | None:
    """The event of a line, None if it is none: damaged, or with a value that cannot be."""
    try:
        # Python writes and reads NaN and infinity, which are no JSON; no reader expects them.
        found = json.loads(line, parse_constant=lambda name: None)
        if b"\\u" in line:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return event_of(found)
    except (ValueError, *UNREADABLE):
        return None
