"""Which way a node's words go to the coordinator, and what waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m
from megatron_ft.smp import upward as upward_module
from megatron_ft.smp.gathering import Gathering
from megatron_ft.smp.node import NodeMachine
from megatron_ft.smp.outbox import MOST_UNHEARD
from megatron_ft.smp.reports import MOST_LOOKS
from megatron_ft.smp.upward import Upward

ONE, TWO = SnapshotId(1, 1), SnapshotId(1, 2)
COORDINATOR, RELAY = b"coordinator", b"relay"
GONE = m.WriterGone("trainer", "dp0", 1)
ENCODE = m.Encode(1, ONE, "w1", ())


class Smp:
    """Upward of node ``n1`` in life 1; ``sent`` is what left, ``timers`` what is to happen."""

    def __init__(self, coordinator: bytes = COORDINATOR) -> None:
        self.machine = NodeMachine("n1", 1)
        self.sent: list[tuple[bytes, Any]] = []
        self.timers: list[Awaitable[Any]] = []
        self.upward = Upward(self.machine, self.timers.append)
        self.upward.send = self._send
        self.upward.coordinator = coordinator

    async def _send(self, identity: bytes, body: m.Message) -> None:
        self.sent.append((identity, body))

    def tell(self, *bodies: Any) -> None:
        for body in bodies:
            asyncio.run(self.upward.tell(body))

    def look(self, told: int = 0) -> None:
        asyncio.run(self.upward.look(m.Lease(1, 60.0, stream=self.upward.stream, told=told)))

    def gather(self, node: str, incarnation: int = 1, sequence: int = 1) -> None:
        frame = m.encode(m.Event(node, incarnation, done(node), 7, 1))
        snapshot = SnapshotId(incarnation, sequence)
        asyncio.run(self.upward.gather(m.Gathered(incarnation, node, snapshot, True, (frame,))))

    def time_passes(self) -> None:
        timers, self.timers[:] = list(self.timers), []
        for timer in timers:
            asyncio.run(timer)  # type: ignore[arg-type]

    def heard(self) -> list[tuple[bytes, list[str]]]:
        """To whom, and the nodes of the reports or the word itself."""
        found = [(to, _names(body)) for to, body in self.sent]
        self.sent.clear()
        return found


def _names(body: Any) -> list[str]:
    if isinstance(body, m.Gathered):
        return [m.decode(frame).node for frame in body.frames]
    bodies = body.body.bodies if isinstance(body.body, m.NodeReport) else (body.body,)
    return [type(one).__name__ for one in bodies]


def done(name: str) -> m.OrderDone:
    return m.OrderDone(ONE, name)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upward_module, "HOLD_SECONDS", 0.0)


def test_every_life_and_every_smp_has_a_stream_of_its_own() -> None:
    """Else the coordinator would take the first words of the new one for repeats."""
    one, other = Smp().upward, Smp().upward
    streams = {one.stream, other.stream}
    one.begin_life()
    assert len({*streams, one.stream, 0}) == 4


def test_whoever_was_asked_through_a_relay_reports_to_it() -> None:
    smp = Smp()
    smp.tell(done("w"))
    assert smp.heard() == [(COORDINATOR, ["OrderDone"])]
    smp.upward.asked_through(ENCODE, RELAY, ())
    smp.tell(done("w"), GONE, m.OrderDone(TWO, "w"))
    ways = [(RELAY, ["n1"]), (COORDINATOR, ["OrderDone", "WriterGone"])]
    assert smp.heard() == [*ways, (COORDINATOR, ["OrderDone"])]
    smp.upward.asked(ENCODE)
    smp.tell(done("w"))
    assert smp.heard() == [(COORDINATOR, ["OrderDone"])]


def test_a_commit_that_is_asked_directly_leaves_the_way_of_reports() -> None:
    smp = Smp()
    smp.upward.asked_through(ENCODE, RELAY, ())
    smp.upward.asked(m.Commit(1, ONE, "local"))
    smp.tell(done("w"))
    assert smp.heard() == [(RELAY, ["n1"])]


def test_a_branch_is_waited_for_and_not_for_long() -> None:
    smp = Smp()
    smp.upward.asked_through(ENCODE, RELAY, ("n2", "n3"))
    smp.gather("n2")
    smp.tell(done("w"))
    assert smp.heard() == [] and len(smp.timers) == 1
    smp.time_passes()
    assert smp.heard() == [(RELAY, ["n2", "n1"])]
    smp.gather("n3")
    assert smp.heard() == [(RELAY, ["n3"])] and not smp.timers
    smp.upward.asked_through(m.Encode(1, TWO, "w1", ()), RELAY, ("n2", "n3"))
    smp.gather("n2", sequence=2)
    assert not smp.sent
    smp.time_passes()
    assert smp.heard() == [(RELAY, ["n2"])]


def test_a_branch_is_whole_only_with_its_relay() -> None:
    smp = Smp()
    smp.upward.asked_through(ENCODE, RELAY, ("n2",))
    smp.gather("n2")
    assert smp.heard() == []
    smp.tell(done("w"))
    assert smp.heard() == [(RELAY, ["n2", "n1"])]
    smp.time_passes()
    assert not smp.sent


def test_a_branch_is_whole_when_all_of_it_have_reported_on_this_round() -> None:
    def of(
        node: str, frame: bytes, *, whole: bool = True, snapshot: SnapshotId = ONE
    ) -> m.Gathered:
        return m.Gathered(1, node, snapshot, whole, (frame,))

    gathering, branch = Gathering(), {"n1", "n2"}
    gathering.begin(ONE, RELAY, branch)
    assert not gathering.add(of("n1", b"a")) and not gathering.add(of("n2", b"b", whole=False))
    assert gathering.take("n1", 1) == m.Gathered(1, "n1", ONE, False, (b"a", b"b"))
    assert gathering.add(of("n2", b"c"))
    assert gathering.take("n1", 1) == m.Gathered(1, "n1", ONE, True, (b"c",))
    assert gathering.take("n1", 1) is None
    gathering.begin(ONE, RELAY, branch)  # the Encode after the Grant
    assert not gathering.add(of("n1", b"d"))
    assert gathering.add(of("n2", b"e", snapshot=SnapshotId(1, 0))), "late: nobody else comes"


def test_a_new_life_passes_on_nothing_of_the_last() -> None:
    smp = Smp()
    smp.upward.asked_through(ENCODE, RELAY, ("n2", "n3"))
    smp.gather("n2")
    smp.machine.highest_incarnation = 2
    smp.upward.begin_life()
    smp.upward.asked_through(m.Encode(2, SnapshotId(2, 1), "w2", ()), RELAY, ("n2", "n3"))
    smp.gather("n3", incarnation=2)
    smp.gather("n3", incarnation=1)
    assert len(smp.timers) == 2 and not smp.sent
    old, new = smp.timers
    asyncio.run(old)  # type: ignore[arg-type]
    assert not smp.sent, "a timer of the last life"
    asyncio.run(new)  # type: ignore[arg-type]
    assert smp.heard() == [(RELAY, ["n3"])]


def test_what_was_told_before_the_coordinator_came_leaves_with_its_heartbeat() -> None:
    smp = Smp(coordinator=b"")
    smp.tell(GONE, done("w"))
    assert not smp.sent
    smp.upward.coordinator = COORDINATOR
    smp.look()
    assert smp.heard() == [(COORDINATOR, ["WriterGone", "OrderDone"])]
    # Once more, an encoder that has died since would have a world begin that is none.
    smp.look(told=2)
    assert not smp.sent


def test_a_word_whose_others_never_come_leaves_after_some_heartbeats() -> None:
    smp = Smp()
    smp.tell(m.CaptureCost("dp0", ONE, 0.0, 0.0, 0, 0.0, 0.0))
    for _ in range(MOST_LOOKS):
        assert not smp.sent
        smp.look()
    assert smp.heard() == [(COORDINATOR, ["CaptureCost"])]


def test_what_no_heartbeat_has_named_is_told_again() -> None:
    smp = Smp()
    smp.tell(GONE, done("w"))
    smp.sent.clear()
    for _ in range(MOST_UNHEARD):
        assert not smp.sent
        smp.look(told=1)
    assert smp.heard() == [(COORDINATOR, ["OrderDone"])]
    smp.look(told=2)
    for _ in range(MOST_UNHEARD):
        smp.look(told=2)
    assert not smp.sent
