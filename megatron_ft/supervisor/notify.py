"""Runs the user's command for events of some kinds, with the event on its standard input."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Collection
from queue import Full, Queue

from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor.event_log import line_of
from megatron_ft.supervisor.events import KINDS, JobEvent
from megatron_ft.supervisor.fleet import Fleet

log = logging.getLogger(__name__)

DEFAULT_KINDS = (
    *("incarnation_ended", "recovered", "node_lost", "spare_lost", "damaged", "drain_failed"),
    *("exposed", "protected_again", "quarantined", "holding", "finished", "stopped"),
)
COMMAND_SECONDS = 30.0
_MOST_WAITING = 100


def kinds_of(text: str) -> tuple[str, ...]:
    """The kinds of events that a user listed; ConfigError for one that does not exist."""
    kinds = tuple(filter(None, (word.strip() for word in text.split(","))))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(
            f"--notify-on {text!r}: there is no event {', '.join(unknown) or 'named'}; the kinds "
            f"are {', '.join(KINDS)}"
        )
    return kinds


class Notifier:
    """Runs a shell command once for each event of certain kinds, one after the other.

    It runs in a thread of its own and never holds the job up.  A command that takes longer than 30
    s is killed; with 100 events waiting, further ones are left out.  Both are logged.
    """

    def __init__(self, command: str, kinds: Collection[str], job: str, fleet: Fleet) -> None:
        self._command, self._kinds, self._job = command, frozenset(kinds), job
        self._fleet = fleet
        self._waiting: Queue[tuple[str, bytes] | None] = Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="megatron-ft-notify", daemon=True)
        self._thread.start()
        fleet.observers.subscribe(self._notice)

    def _notice(self, event: JobEvent) -> None:
        if event.kind not in self._kinds:
            return
        line = line_of(event, self._job, self._fleet.incarnation)
        try:
            self._waiting.put_nowait((event.kind, line))
        except Full:
            log.warning("no notification of %s: %d events wait", event.kind, _MOST_WAITING)

    def close(self, seconds: float = COMMAND_SECONDS) -> None:
        """Wait for the commands that are due, at most so long."""
        deadline = time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
        except Full:
            log.warning("notifications are left out: %d events wait", _MOST_WAITING)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            kind, line = waiting
            try:
                subprocess.run(
                    self._command,
                    shell=True,
                    input=line,
                    stdout=subprocess.DEVNULL,
                    timeout=COMMAND_SECONDS,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("--notify-command failed on %s: %s", kind, error)
