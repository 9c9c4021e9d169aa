"""Times of a job's own recoveries, holds and queues, from its events, or defaults.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ft.core.identity import HOLD, SHRINK
from megatron_ft.supervisor.event_log import RecordedEvent
from megatron_ft.supervisor.ledger import ENDED, SUPERVISING, timeline
from megatron_ft.supervisor.recovery_cost import (
    DRAIN,
    GROW,
    HOST,
    IN_PLACE,
    QUEUE,
    SPARE,
    START,
)

RESTARTS = (IN_PLACE, SPARE, SHRINK, GROW)
DEFAULTS = {**dict.fromkeys((*RESTARTS, START, DRAIN), 60.0), HOST: 1800.0, QUEUE: 0.0}
"""Seconds where a job has measured none, and nobody has given any."""

_TAKES = {"spare": SPARE, "shrunk": SHRINK, "grown": GROW}
_ENDS_DRAIN = ("holding", "hold_refused", "salvage_failed", "stopped")


class Estimate(NamedTuple):
    """Expected seconds, and where they come from."""

    seconds: float
    source: str


class MeasuredTimes:
    """Seconds of each thing that a job did; ``in_vain`` are those in which no host came.

    Where hosts come ``unasked``, a job that has shrunk waits for them, too.
    """

    def __init__(self, events: Iterable[RecordedEvent], unasked: bool = True) -> None:
        self._unasked = unasked
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.in_vain = 0.0
        self._since: dict[str, float] = {}
        self._took, self._apart, self._lost, at = "", 0.0, False, 0.0
        for at, event in timeline(events):
            self._take(event["kind"], at, event.get("ago", 0.0))
        self._no_host(SHRINK, at)

    def estimate(self, name: str, given: float = 0.0) -> Estimate:
        """The mean of what was measured; what was ``given``, if not 0, counts as one of these.

        For a restart of a kind that never was, that of others, or the job's start.  Time in
        which no host came counts as that of an exponential law does: it has no end yet.
        """
        found, source = self.spent[name], f"{len(self.spent[name])} measured"
        if given:
            found, source = [given, *found], f"given, {source}"
        elif not found and name in RESTARTS:
            others = [seconds for other in RESTARTS for seconds in self.spent[other]]
            found, source = others or self.spent[START], "other starts"
        if not found:
            found, source = [DEFAULTS[name]], "default"
        in_vain = self.in_vain if name == HOST else 0.0
        source += f", {in_vain:.0f} s in vain" if in_vain else ""
        return Estimate((sum(found) + in_vain) / len(found), source)

    def _take(self, kind: str, at: float, ago: float) -> None:
        since = self._since
        self._took = _TAKES.get(kind, self._took)
        if kind in _ENDS_DRAIN:
            self._end(DRAIN, at)
        if kind == SUPERVISING:
            self._end(QUEUE, at)
            self._since, self._apart = {START: at}, 0.0
        elif kind == ENDED:
            since.setdefault("down", at - ago)
            self._apart += self._end(HOLD, at, HOST)
        elif kind == "training":
            self._trains(at)
        elif kind in ("stopped", "held_in_vain"):
            self._apart += self._no_host(HOLD, at)
            since |= {QUEUE: at} if kind == "stopped" else {}
        elif kind in ("holding", "salvaging"):
            since[HOLD if kind == "holding" else DRAIN] = at
        elif kind == "shrunk" and self._lost and self._unasked:
            since.setdefault(SHRINK, at)
        elif kind == "grown":
            self._end(SHRINK, at, HOST)
        self._lost |= kind == "node_lost"

    def _trains(self, at: float) -> None:
        down = self._since.pop("down", at) + self._apart
        if not self._end(START, at):
            self.spent[self._took or IN_PLACE].append(max(0.0, at - down))
        self._took, self._apart, self._lost = "", 0.0, False

    def _end(self, name: str, at: float, as_name: str = "") -> float:
        """Note that something has ended, if it had begun; how long it took."""
        if name not in self._since:
            return 0.0
        seconds = at - self._since.pop(name)
        self.spent[as_name or name].append(seconds)
        self._apart += seconds if name == DRAIN else 0.0
        return seconds

    def _no_host(self, name: str, at: float) -> float:
        seconds = at - self._since.pop(name, at)
        self.in_vain += seconds
        return seconds
