"""Events of one SMP with their numbers, and those that may have been lost.  Pure.

A relay dies with what it has, a connection that is made anew without what was under way.  So
every event is kept here until a heartbeat says that it has arrived, and told again if none does
in time.  What a relay was given also goes along with whatever is sent directly before that:
nothing overtakes it.
"""

from __future__ import annotations

from typing import Any

from megatron_ft.smp import messages as m

MOST_UNHEARD = 3
"""Heartbeats after which what should have arrived is sent directly, once more.

The first may have left before it, and relays hold it for some time: with the usual heartbeats of
0.5 s this is 1.0 s at least.
"""


class Outbox:
    """Numbers count from 1 in each ``stream``, which no other outbox of the node has.

    ``unheard`` are the newest events, of which no heartbeat has said that they have arrived;
    so many of them as ``behind`` says, the newest, only relays were given.
    """

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self.unheard: list[Any] = []
        self._next = 1
        self.behind = 0
        self._looks = 0

    def direct(self, node: str, incarnation: int, bodies: list[Any]) -> m.Event:
        """An event for the coordinator's own connection, behind all that relays may not bring."""
        older = self.unheard[len(self.unheard) - self.behind :]
        first, self.behind = self._next - len(older), 0
        self._keep(bodies)
        return m.Event(node, incarnation, report([*older, *bodies]), self.stream, first)

    def relayed(self, node: str, incarnation: int, bodies: list[Any]) -> m.Event:
        """An event that a relay brings."""
        first, self.behind = self._next, self.behind + len(bodies)
        self._keep(bodies)
        return m.Event(node, incarnation, report(bodies), self.stream, first)

    def again(self, node: str, incarnation: int) -> m.Event:
        """All that may have been lost, for the coordinator's own connection."""
        self.behind, self._looks = len(self.unheard), 0
        return self.direct(node, incarnation, [])

    def heard(self, stream: int, number: int) -> None:
        """The coordinator has all events up to this number of a stream."""
        left = self._next - 1 - number
        if stream == self.stream and left < len(self.unheard):
            self.unheard = self.unheard[len(self.unheard) - max(left, 0) :]
            self.behind, self._looks = min(self.behind, len(self.unheard)), 0

    def overdue(self) -> bool:
        """A heartbeat: whether something has been under way for too long."""
        self._looks += 1 if self.unheard else 0
        return bool(self.unheard) and self._looks >= MOST_UNHEARD

    def _keep(self, bodies: list[Any]) -> None:
        self._looks = self._looks if self.unheard else 0
        self.unheard = [*self.unheard, *bodies]
        self._next += len(bodies)


def report(bodies: list[Any]) -> Any:
    """The body of the one event that brings these."""
    return bodies[0] if len(bodies) == 1 else m.NodeReport(tuple(bodies))


def reported(event: m.Event) -> list[m.Event]:
    """The events that one message has brought, in the order in which they were told."""
    body = event.body
    bodies = body.bodies if isinstance(body, m.NodeReport) else (body,)
    numbers = range(event.first, event.first + len(bodies))
    told = zip(bodies, numbers, strict=True)
    return [m.Event(event.node, event.incarnation, b, event.stream, n) for b, n in told]
