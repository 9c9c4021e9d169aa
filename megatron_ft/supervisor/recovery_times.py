"""Times of a job's own recoveries, holds and queues, from its events, and the defaults.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean
from typing import NamedTuple

from megatron_ft.supervisor.event_log import RecordedEvent
from megatron_ft.supervisor.ledger import ENDED, SUPERVISING, timeline
from megatron_ft.supervisor.recovery_cost import HOLD, IN_PLACE, SHRINK, SPARE

GROW, START, DRAIN, QUEUE, HOST = "grow", "start", "drain", "queue", "host"
DEFAULTS = {START: 60.0, DRAIN: 60.0, HOST: 1800.0}
"""Seconds where a job has measured none, and nobody has given any."""

_TAKES = {"spare": SPARE, "shrunk": SHRINK, "grown": GROW}
_BEGINS = {"holding": HOLD, "salvaging": DRAIN}
_ENDS_DRAIN = ("holding", "hold_refused", "salvage_failed", "stopped")


class Estimate(NamedTuple):
    """Expected seconds, and where they come from."""

    seconds: float
    source: str


class MeasuredTimes:
    """Seconds of each thing that a job did, ``waited`` for hosts, and how often they ``came``."""

    def __init__(self, events: Iterable[RecordedEvent]) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.waited, self.came = 0.0, 0
        self._since: dict[str, float] = {}
        self._took, self._apart, self._lost, at = "", 0.0, False, 0.0
        for at, event in timeline(events):
            self._take(event["kind"], at, event)
        if SHRINK in self._since:
            # It has not ended: the longer, the longer are such times expected to be.
            self._end_wait(SHRINK, at, came=False)

    def estimate(self, name: str) -> Estimate:
        """The mean of what was measured, else of all restarts, else of the start, else a default."""
        restarts = [s for way in (IN_PLACE, SPARE, SHRINK, GROW) for s in self.spent[way]]
        restart = name not in (DRAIN, START)
        for found, source in (
            (self.spent[name], f"{len(self.spent[name])} measured"),
            (restarts if restart else [], "other restarts"),
            (self.spent[START] if restart else [], "the start"),
        ):
            if found:
                return Estimate(mean(found), source)
        return Estimate(DEFAULTS[DRAIN if name == DRAIN else START], "default")

    def host(self, given: float) -> Estimate:
        """Mean time until a host comes: that of an exponential law, of which not all have come.

        What was ``given``, or the default, counts as one that came.
        """
        prior, source = (given, "given") if given else (DEFAULTS[HOST], "default")
        if self.waited:
            source = f"{self.came} measured, and {prior:g} s {source}"
        return Estimate((prior + self.waited) / (1 + self.came), source)

    def queue(self, given: float) -> Estimate:
        """Mean time in the queue; what was ``given`` counts as one of those measured."""
        found = self.spent[QUEUE]
        source = f"{len(found)} measured, and {given:g} s given" if found else "given"
        return Estimate((given + sum(found)) / (1 + len(found)), source)

    def _take(self, kind: str, at: float, event: RecordedEvent) -> None:
        since = self._since
        self._took = _TAKES.get(kind, self._took)
        if DRAIN in since and kind in _ENDS_DRAIN:
            self._end(DRAIN, at)
        if kind == SUPERVISING:
            self._end(QUEUE, at)
            self._since, self._took, self._apart = {START: at}, "", 0.0
        elif kind == ENDED:
            since.setdefault("down", at - event.get("ago", 0.0))
            self._end_wait(HOLD, at, came=True)
        elif kind == "training":
            self._trains(at)
        elif kind in ("stopped", "held_in_vain"):
            self._end_wait(HOLD, at, came=False)
            since |= {QUEUE: at} if kind == "stopped" else {}
        elif kind == "node_lost":
            self._lost = True
        elif kind in _BEGINS:
            since[_BEGINS[kind]] = at
        elif kind == "shrunk" and self._lost:
            since.setdefault(SHRINK, at)
        elif kind == "grown":
            self._end_wait(SHRINK, at, came=True)

    def _trains(self, at: float) -> None:
        start, down = self._since.pop(START, None), self._since.pop("down", None)
        if start is not None:
            self.spent[START].append(at - start)
        elif down is not None:
            self.spent[self._took or IN_PLACE].append(max(0.0, at - down - self._apart))
        self._took, self._apart, self._lost = "", 0.0, False

    def _end(self, name: str, at: float) -> None:
        since = self._since.pop(name, None)
        if since is not None:
            self.spent[name].append(at - since)
            self._apart += at - since

    def _end_wait(self, name: str, at: float, *, came: bool) -> None:
        since = self._since.pop(name, None)
        if since is not None:
            self.waited += at - since
            self.came += came
            # A job that has shrunk trains meanwhile.
            self._apart += at - since if name == HOLD else 0.0
