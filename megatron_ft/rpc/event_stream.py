"""The stream of events from an SMP to its coordinator: one message a round, and none lost.

``EventPublisher`` is the SMP's end.  Its ``EventBatch`` holds events back until those of the node's
other ranks are there, its ``Outbox`` numbers them and keeps each until it has arrived.
``EventSubscription`` is the coordinator's end; its heartbeats say what has arrived.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Peer

Send = Callable[[Peer, m.Message], Awaitable[Any]]
"""Sends one message to one peer; a peer that has left gets nothing."""

MOST_WAITED = 10
"""Heartbeats after which an event waits no longer, should the others never come."""

MOST_UNACKED = 3
"""Heartbeats after which an event that should have arrived is sent once more.

The first may have left before it: with the usual heartbeats of 0.5 s this is 1.0 s at least.
"""


class EventBatch:
    """Events that wait for those of the node's other ranks.  Pure.

    The coordinator acts only when *all* ranks have sealed, or encoded.  So the event of one
    rank waits here for those of the node's other ranks, and all of them leave as one message, in
    their order.  Any other event (a missed capture, a dead writer) leaves at once, together with
    those that wait.
    """

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.snapshot: SnapshotId | None = None
        self.sealed: set[str] = set()
        self._beats = 0

    def add(self, body: Any, shards: Collection[str]) -> list[Any]:
        """Events that leave now because of ``body``, oldest first; ``shards`` are the node's."""
        self.waiting.append(body)
        if isinstance(body, m.CaptureCost | m.Encoded):
            return []  # Sealed and OrderDone come after them
        if isinstance(body, m.Sealed):
            record = body.record
            if self.snapshot is None or record.snapshot > self.snapshot:
                self.snapshot, self.sealed = record.snapshot, set()
            if record.snapshot == self.snapshot:  # older ones do not wait for other ranks
                self.sealed.add(record.shard_id)
                if not self.sealed >= set(shards):
                    return []
        return self.flush()

    def on_heartbeat(self) -> list[Any]:
        """Count a heartbeat; returns the events that have waited too long."""
        self._beats += 1 if self.waiting else 0
        return self.flush() if self._beats >= MOST_WAITED else []

    def flush(self) -> list[Any]:
        taken, self.waiting, self._beats = self.waiting, [], 0
        return taken


class Outbox:
    """Numbers events, and keeps each until a heartbeat says that it has arrived.  Pure.

    A connection that is made anew loses the messages under way.  So every event is kept in
    ``unacked`` until a heartbeat names it, and sent again if none does in time.  Numbers count
    from 1 in each ``stream``, which no other outbox of the node has.
    """

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self.unacked: list[Any] = []
        self._last = 0
        self._beats = 0

    def event(self, node: str, incarnation: int, bodies: list[Any]) -> m.NodeEvent:
        self._beats = self._beats if self.unacked else 0
        first, self._last = self._last + 1, self._last + len(bodies)
        self.unacked = [*self.unacked, *bodies]
        return self._message(node, incarnation, bodies, first)

    def again(self, node: str, incarnation: int) -> m.NodeEvent:
        """One message with all that may have been lost."""
        self._beats = 0
        first = self._last - len(self.unacked) + 1
        return self._message(node, incarnation, self.unacked, first)

    def arrived(self, stream: int, number: int) -> None:
        """Drop the events up to this number of a stream: the coordinator has them."""
        left = max(self._last - number, 0)
        if stream == self.stream and left < len(self.unacked):
            self.unacked, self._beats = self.unacked[len(self.unacked) - left :], 0

    def overdue(self) -> bool:
        """Count a heartbeat; True if something has been under way for too long."""
        self._beats += 1 if self.unacked else 0
        return self._beats >= MOST_UNACKED

    def _message(self, node: str, incarnation: int, bodies: list[Any], first: int) -> m.NodeEvent:
        body = bodies[0] if len(bodies) == 1 else m.NodeReport(tuple(bodies))
        return m.NodeEvent(node, incarnation, body, self.stream, first)


class EventSubscription:
    """The coordinator's end: events of one node in their order, each once.  Pure.

    ``number`` is the last event of ``stream`` that has arrived with all before it.  An SMP that
    was replaced, or admitted anew, begins another stream.
    """

    def __init__(self) -> None:
        self.stream = self.number = 0

    def take(self, event: m.NodeEvent) -> list[m.NodeEvent]:
        """The new events of a message; nothing if one before them was lost: it comes again."""
        if event.stream != self.stream:
            self.stream, self.number = event.stream, 0
        if event.first > self.number + 1:
            return []
        new = [one for one in reported(event) if one.first > self.number]
        if new:
            self.number = new[-1].first
        return new


def reported(event: m.NodeEvent) -> list[m.NodeEvent]:
    """The events that one message has brought, in their order."""
    body = event.body
    bodies = body.bodies if isinstance(body, m.NodeReport) else (body,)
    numbers = range(event.first, event.first + len(bodies))
    numbered = zip(bodies, numbers, strict=True)
    return [m.NodeEvent(event.node, event.incarnation, b, event.stream, n) for b, n in numbered]


class EventPublisher:
    """Sends the events of the SMP of ``node`` with ``send``, a server's.

    ``shards`` are those of the node and ``incarnation`` gives the one that it obeys, at the time.
    ``coordinator`` is the peer that had the lease last, empty before the first.
    """

    def __init__(
        self, node: str, shards: Collection[str], incarnation: Callable[[], int], send: Send
    ) -> None:
        self.coordinator = b""
        self._node, self._shards, self._incarnation, self._send = node, shards, incarnation, send
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Forget the events of an older incarnation."""
        self._batch, self._outbox = EventBatch(), Outbox(1 + secrets.randbits(31))
        self._early: list[Any] = []

    async def publish(self, body: Any) -> None:
        """Send an event: at once, or with the node's others, or once there is a coordinator."""
        await self._leave(self._batch.add(body, self._shards))

    async def on_heartbeat(self, lease: m.Lease) -> None:
        """Drop the events that have arrived; send those that have waited or are missing."""
        self._outbox.arrived(lease.stream, lease.acked_event)
        early, self._early = self._early, []
        await self._leave([*early, *self._batch.on_heartbeat()])
        if self._outbox.overdue():
            await self._to_coordinator(self._outbox.again(self._node, self._incarnation()))

    async def _leave(self, bodies: list[Any]) -> None:
        """Send these as one message; nothing if there are none."""
        if not self.coordinator:
            # An encoder may find a restarted SMP before the coordinator does.
            self._early += bodies
        elif bodies:
            event = self._outbox.event(self._node, self._incarnation(), bodies)
            await self._to_coordinator(event)

    async def _to_coordinator(self, event: m.NodeEvent) -> None:
        await self._send((self.coordinator, b""), event)
