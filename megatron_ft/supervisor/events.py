"""Events of a job, and the observers that get them from the supervisor and its coordinator."""

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
    """Functions that get every event; one that fails stops nobody and gets the next one, too."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Have ``observer`` get every event from now on."""
        self._observers.append(observer)

    def emit(self, kind: str, text: str, **fields: Any) -> None:
        """Pass one event on."""
        event = JobEvent(kind, text, fields)
        for observer in list(self._observers):
            try:
                observer(event)
            except Exception as error:
                log.error("%r failed on %r: %r", observer, kind, error)
