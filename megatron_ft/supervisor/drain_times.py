"""Times of drains: what is due, what is urgent, what a stop leaves time for.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

SAFETY_FACTOR = 1.5
"""The last drain before the time limit may take so many times as long as the slowest so far."""


@dataclass
class Urgency:
    """Reasons to drain at once, each given once, again only after it was gone.

    Times are in seconds of one clock.  ``ends_at`` is when the job will be killed, None if
    nobody knows; ``margin`` is what must be left then.
    """

    ends_at: float | None = None
    margin: float = 0.0
    _given: set[str] = field(default_factory=set)

    def poll(self, now: float, *, spares_gone: bool, slowest: float) -> str:
        """A new reason, or empty.

        ``spares_gone`` is whether a node was lost and nobody is left to replace another one;
        ``slowest`` how long drains took, 0 if none has ended yet.
        """
        present = set()
        if spares_gone:
            present.add("no spare is left: the next loss of a node stops the job")
        late = self.margin + SAFETY_FACTOR * slowest
        if self.ends_at is not None and not slowest:
            present.add("the job's time is limited, and the first drain shows how long one takes")
        if self.ends_at is not None and now >= self.ends_at - late:
            present.add("the job's time ends")
        fresh, self._given = present - self._given, present
        return "; ".join(sorted(fresh))


def is_due(last: int, committed: int, interval: int, urgent: bool = False) -> bool:
    """True if ``committed`` is to be drained when ``last`` was the iteration before.  Pure.

    What is ``urgent`` waits for no interval, but the same iteration is not drained again.  A lower
    one is of training that has gone back, and what is on disk of what was given up.  An interval
    of 0 stands for none.
    """
    step = 1 if urgent else interval
    return step > 0 and (committed < last or committed >= last + step)


def gives_way(running: float, slowest: float, left: float) -> bool:
    """True if a drain that has run so long is given up at a stop for a fresher snapshot.

    ``slowest`` is how long drains took, 0 if none has ended yet; ``left`` is until the end.  It is
    if only one of the two can be written, and the fresher one can.  Where nobody knows, what has
    begun goes first.
    """
    rest = max(0.0, slowest - running)
    return 0.0 < slowest <= left < rest + slowest
