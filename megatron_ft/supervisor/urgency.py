"""When a drain cannot wait for its interval: protection is degraded, or time runs out.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

ENCODERS_PATIENCE_SECONDS = 30.0
"""An encoder world that broke is started again at once; this long without one is degraded."""

SAFETY_FACTOR = 1.5
"""How much longer than the slowest so far the last drain before the time limit may take."""


@dataclass
class Urgency:
    """Reasons to drain at once, each said once, again only after it was gone.

    Times are in seconds of one clock.  ``ends_at`` is when the job will be killed, None if
    nobody knows; ``margin`` is what must be left then.  ``parity`` is whether snapshots
    should have any.
    """

    parity: bool
    ends_at: float | None = None
    margin: float = 0.0
    patience: float = ENCODERS_PATIENCE_SECONDS
    _world_seen: float | None = None
    _said: set[str] = field(default_factory=set)

    def look(self, now: float, *, world_up: bool, spares_gone: bool, slowest: float) -> str:
        """A new reason, or empty.

        ``spares_gone`` is whether a node was lost and nobody is left to replace another one;
        ``slowest`` how long drains took, 0 if none has ended yet.
        """
        if world_up or not self.parity or self._world_seen is None:
            self._world_seen = now
        unprotected = now - self._world_seen
        present = {
            "encoders": unprotected > self.patience,
            "spares": spares_gone,
            "measure": self.ends_at is not None and not slowest,
            "time": self.ends_at is not None
            and now >= self.ends_at - self.margin - SAFETY_FACTOR * slowest,
        }
        self._said &= {name for name, there in present.items() if there}
        fresh = [name for name, there in present.items() if there and name not in self._said]
        self._said |= set(fresh[-1:])
        return self._text(fresh[-1], now) if fresh else ""

    def _text(self, name: str, now: float) -> str:
        texts = {
            "encoders": f"no encoder world for {self.patience:.0f} s: a node loss would cost all "
            "that was committed since",
            "spares": "a node is lost and no spare is left: the next loss stops the job",
            "measure": "the job's time is limited: the first drain shows how long one takes",
        }
        left = 0.0 if self.ends_at is None else max(0.0, self.ends_at - now)
        return texts.get(name, f"the job's time ends in {left:.0f} s")
