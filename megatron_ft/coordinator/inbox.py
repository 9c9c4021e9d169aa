"""Events of one node in their order, each once, over whichever way it came.  Pure."""

from __future__ import annotations

from megatron_ft.smp import messages as m
from megatron_ft.smp.outbox import reported


class Inbox:
    """``number`` is the last event of ``stream`` that has arrived with all before it."""

    def __init__(self) -> None:
        self.stream = self.number = 0

    def direct(self, event: m.Event) -> list[m.Event]:
        """What is new in a message of the node's own connection.

        It brings along whatever a relay has not; what a connection has lost comes again.
        """
        self.begin(event.stream)
        return self._new(event)

    def begin(self, stream: int) -> None:
        """The node itself has said which stream its events are of."""
        if stream != self.stream:
            self.stream, self.number = stream, 0

    def relayed(self, event: m.Event) -> list[m.Event]:
        """What is new in a message that relays have brought; late words of an SMP that was
        replaced are not.
        """
        return self._new(event) if event.stream == self.stream else []

    def _new(self, event: m.Event) -> list[m.Event]:
        """Nothing if one before it has not come."""
        if event.first > self.number + 1:
            return []
        new = [one for one in reported(event) if one.first > self.number]
        if new:
            self.number = new[-1].first
        return new
