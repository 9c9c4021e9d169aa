"""Events of one SMP with their numbers, and those that a relay may lose.  Pure.

What goes to the coordinator directly is as safe as its connection.  What a relay brings is kept
here until a heartbeat says that it has arrived, and goes along with whatever is
sent directly before that: nothing overtakes it, and nothing is lost with a relay.
"""

from __future__ import annotations

from typing import Any

from megatron_ft.smp import messages as m

MOST_UNHEARD = 3
"""Heartbeats after which what a relay should have brought is sent directly.

The first may have left before it, and relays hold it for some time: with the usual heartbeats of
0.5 s this is 1.0 s at least.
"""


class Outbox:
    """Numbers count from 1 in each ``stream``, which no other outbox of the node has."""

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self.unheard: list[Any] = []
        self._next = 1
        self._looks = 0

    def direct(self, node: str, incarnation: int, bodies: list[Any]) -> m.Event:
        """An event for the coordinator's own connection, behind all that it may not have."""
        older, self.unheard = self.unheard, []
        first = self._next - len(older)
        self._next += len(bodies)
        return m.Event(node, incarnation, report([*older, *bodies]), self.stream, first)

    def relayed(self, node: str, incarnation: int, bodies: list[Any]) -> m.Event:
        """An event that a relay brings."""
        first, self._looks = self._next, self._looks if self.unheard else 0
        self.unheard = [*self.unheard, *bodies]
        self._next += len(bodies)
        return m.Event(node, incarnation, report(bodies), self.stream, first)

    def heard(self, stream: int, number: int) -> None:
        """The coordinator has all events up to this number of a stream."""
        left = self._next - 1 - number
        if stream == self.stream and left < len(self.unheard):
            self.unheard = self.unheard[len(self.unheard) - max(left, 0) :]
            self._looks = 0

    def overdue(self) -> bool:
        """A heartbeat: whether something has been under way for too long."""
        self._looks += 1 if self.unheard else 0
        return bool(self.unheard) and self._looks >= MOST_UNHEARD


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
