"""A node's words reach the coordinator once and in order, whatever connections lose."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import (
    MOST_UNACKED,
    MOST_WAITED,
    EventPublisher,
    EventSubscription,
    Outbox,
    reported,
)
from megatron_ft.rpc.sockets import Peer

ONE = SnapshotId(1, 1)
COORDINATOR = b"coordinator"
GONE = m.WriterGone("trainer", "dp0", 1)


def word(name: str) -> Any:
    return m.OrderDone(ONE, name)


class Smp:
    """EventPublisher of node ``n1`` in incarnation 1; ``sent`` is what left."""

    def __init__(self, coordinator: bytes = COORDINATOR) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.sender = EventPublisher("n1", (), lambda: 1, self._send)
        self.sender.coordinator = coordinator

    async def _send(self, peer: Peer, body: m.Message) -> None:
        self.sent.append((peer[0], body))

    def tell(self, *bodies: Any) -> None:
        for body in bodies:
            asyncio.run(self.sender.publish(body))

    def look(self, told: int = 0) -> None:
        stream = self.sender._outbox.stream
        asyncio.run(self.sender.on_heartbeat(m.Lease(1, 60.0, stream=stream, acked_event=told)))

    def heard(self) -> list[tuple[bytes, list[str]]]:
        """To whom, and the kinds of words in each message."""
        found = [(to, [type(e.body).__name__ for e in reported(event)]) for to, event in self.sent]
        self.sent.clear()
        return found


def test_every_incarnation_and_every_smp_has_a_stream_of_its_own() -> None:
    """Else the coordinator would take the first words of the new one for repeats."""
    one, other = Smp().sender, Smp().sender
    streams = {one._outbox.stream, other._outbox.stream}
    one.begin_incarnation()
    assert len({*streams, one._outbox.stream, 0}) == 4


def test_what_was_told_before_the_coordinator_came_leaves_with_its_heartbeat() -> None:
    smp = Smp(coordinator=b"")
    smp.tell(GONE, word("w"))
    assert not smp.sent
    smp.sender.coordinator = COORDINATOR
    smp.look()
    assert smp.heard() == [(COORDINATOR, ["WriterGone", "OrderDone"])]
    # Once more, an encoder that has died since would have a world begin that is none.
    smp.look(told=2)
    assert not smp.sent


def test_a_word_whose_others_never_come_leaves_after_some_heartbeats() -> None:
    smp = Smp()
    smp.tell(m.CaptureCost("dp0", ONE, 0.0, 0.0, 0, 0.0, 0.0))
    for _ in range(MOST_WAITED):
        assert not smp.sent
        smp.look()
    assert smp.heard() == [(COORDINATOR, ["CaptureCost"])]


def test_what_no_heartbeat_has_named_is_told_again() -> None:
    smp = Smp()
    smp.tell(GONE, word("w"))
    smp.sent.clear()
    for _ in range(MOST_UNACKED):
        assert not smp.sent
        smp.look(told=1)
    assert smp.heard() == [(COORDINATOR, ["OrderDone"])]
    for _ in range(MOST_UNACKED + 1):
        smp.look(told=2)
    assert not smp.sent


def test_what_is_overdue_is_told_until_a_heartbeat_of_its_stream_names_it() -> None:
    outbox = Outbox(7)
    assert not any(outbox.overdue() for _ in range(9)), "nothing was told"
    outbox.event("n0", 1, [word("a")])
    outbox.event("n0", 1, [word("b"), word("c")])
    assert [outbox.overdue() for _ in range(MOST_UNACKED)] == [False] * (MOST_UNACKED - 1) + [True]
    outbox.arrived(7, 2)
    assert outbox.unacked == [word("c")]
    outbox.arrived(6, 3)
    for _ in range(2):
        assert outbox.again("n0", 1) == m.NodeEvent("n0", 1, word("c"), 7, 3)
        assert [outbox.overdue() for _ in range(MOST_UNACKED)][-1], "that may be lost as well"
    outbox.arrived(7, 3)
    assert not outbox.unacked and not outbox.overdue()


def test_a_report_is_unpacked_to_what_was_told() -> None:
    bodies = [word("a"), word("b")]
    for some in (bodies, bodies[:1]):
        event = m.decode(m.encode(Outbox(7).event("n0", 1, some)))
        assert reported(event) == [m.NodeEvent("n0", 1, b, 7, 1 + i) for i, b in enumerate(some)]


@dataclass
class Path:
    """An SMP, its connection and its coordinator: words are told by themselves or in twos.

    ``queue`` is the connection, ``beat`` what a heartbeat under way says has been heard.
    ``resets`` of the connection, deaths of the SMP and needless repeats are as many as given.
    """

    resets: int = 1
    deaths: int = 1
    needless: int = 1
    told: int = 0
    owed: int = 0
    outbox: Outbox = field(default_factory=lambda: Outbox(1))
    inbox: EventSubscription = field(default_factory=EventSubscription)
    queue: tuple[m.NodeEvent, ...] = ()
    beat: tuple[int, int] | None = None
    heard: tuple[int, ...] = ()

    WORDS = 4

    def key(self) -> Any:
        """The same for the same states."""
        outbox, inbox = self.outbox, self.inbox
        ends = (outbox.stream, outbox._last, len(outbox.unacked), inbox.stream, inbox.number)
        left = (self.resets, self.deaths, self.needless, self.told, self.owed)
        return ends, left, self.queue, self.beat, self.heard

    def steps(self) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """What can come next; without faults, all of it comes some time."""
        for count in (1, 2):
            if self.told + count <= self.WORDS:
                yield f"tell {count}", lambda path, count=count: path.tell(count)  # type: ignore[misc]
        lost = bool(self.outbox.unacked) and not self.queue
        if (lost and self.beat is None) or (self.outbox.unacked and self.needless):
            yield "again", Path.again
        said = (self.inbox.stream, self.inbox.number)
        if self.beat is None and self.outbox.unacked and said[1]:
            yield "beat", Path.begin_beat
        if self.beat is not None:
            yield "acknowledge", Path.acknowledge
        if self.queue:
            yield "arrive", Path.arrive
        if self.resets:
            yield "fault: reset", Path.reset
        if self.deaths:
            yield "fault: die", Path.die

    def tell(self, count: int) -> None:
        bodies = [word(str(self.told + number)) for number in range(count)]
        self.told += count
        self.queue += (self.outbox.event("n1", 1, bodies),)

    def again(self) -> None:
        self.needless -= 1 if self.queue or self.beat is not None else 0
        self.queue += (self.outbox.again("n1", 1),)

    def begin_beat(self) -> None:
        self.beat = (self.inbox.stream, self.inbox.number)

    def acknowledge(self) -> None:
        assert self.beat is not None
        self.outbox.arrived(*self.beat)
        self.beat = None

    def arrive(self) -> None:
        event, self.queue = self.queue[0], self.queue[1:]
        self.heard += tuple(int(one.body.world) for one in self.inbox.take(event))  # type: ignore[union-attr]
        known = [n for n in self.heard if n >= self.owed]
        assert list(self.heard) == sorted(set(self.heard)), f"heard as {self.heard}"
        assert known == list(range(self.owed, self.owed + len(known))), f"heard as {self.heard}"

    def reset(self) -> None:
        self.resets, self.queue = self.resets - 1, ()

    def die(self) -> None:
        """Another SMP begins; what this one had told and was not heard is lost with it."""
        self.deaths, self.queue, self.owed = self.deaths - 1, (), self.told
        self.outbox = Outbox(self.outbox.stream + 1)


def explore() -> int:
    """Take every step from every state; how many there are."""
    seen, waiting = {Path().key()}, [Path()]
    while waiting:
        path = waiting.pop()
        steps = list(path.steps())
        if all(name.startswith("fault") for name, _ in steps):
            assert set(range(path.owed, path.told)) <= set(path.heard), f"only {path.heard} came"
        for _, perform in steps:
            after = copy.copy(path)
            after.outbox, after.inbox = copy.copy(path.outbox), copy.copy(path.inbox)
            perform(after)
            if after.key() not in seen:
                seen.add(after.key())
                waiting.append(after)
    return len(seen)


def test_every_order_of_steps_brings_everything_once_and_in_its_order() -> None:
    assert explore() > 5000


def entrusted(self: Outbox, node: str, incarnation: int, bodies: list[Any]) -> m.NodeEvent:
    """A connection loses nothing."""
    event = EVENT(self, node, incarnation, bodies)
    self.unacked = []
    return event


def confirmed_by_any(self: Outbox, stream: int, number: int) -> None:
    """A heartbeat to the SMP before this one counts."""
    HEARD(self, self.stream, number)


def taken_with_gaps(self: EventSubscription, event: m.NodeEvent) -> list[m.NodeEvent]:
    """What came before it may come later."""
    if event.stream != self.stream:
        self.stream, self.number = event.stream, 0
    new = [one for one in reported(event) if one.first > self.number]
    self.number = new[-1].first if new else self.number
    return new


def taken_as_one_stream(self: EventSubscription, event: m.NodeEvent) -> list[m.NodeEvent]:
    """Words of an SMP that was replaced are taken for those of its successor."""
    self.stream = event.stream
    return TAKE(self, event)


def taken_again(self: EventSubscription, event: m.NodeEvent) -> list[m.NodeEvent]:
    """What has come is taken again."""
    TAKE(self, event)
    return reported(event)


EVENT, HEARD, TAKE = Outbox.event, Outbox.arrived, EventSubscription.take
MISTAKES: list[tuple[type, str, Callable[..., Any]]] = [
    (Outbox, "event", entrusted),
    (Outbox, "arrived", confirmed_by_any),
    (EventSubscription, "take", taken_with_gaps),
    (EventSubscription, "take", taken_as_one_stream),
    (EventSubscription, "take", taken_again),
]


@pytest.mark.parametrize("of, name, instead", MISTAKES, ids=[m[2].__name__ for m in MISTAKES])
def test_each_mistake_is_found(
    of: type, name: str, instead: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, instead)
    with pytest.raises(AssertionError, match="heard as|came"):
        explore()
