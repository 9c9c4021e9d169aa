"""What the coordinator and the supervisor tell those who watch the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobEvent:
    """One thing that happened.  ``kind`` is a fixed word, ``text`` is for people.

    ``monotonic`` is in seconds; ``fields`` holds what a program needs to know.
    """

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    monotonic: float = field(default_factory=time.monotonic)


Observer = Callable[[JobEvent], None]


class Observers:
    """Those who are told; one that fails stops nobody and is told the next event, too."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Tell ``observer`` every event from now on."""
        self._observers.append(observer)

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """Pass one event on."""
        event = JobEvent(kind, text, fields)
        for observer in list(self._observers):
            try:
                observer(event)
            except Exception as error:
                log.error("%r was not told of %r: %r", observer, kind, error)
