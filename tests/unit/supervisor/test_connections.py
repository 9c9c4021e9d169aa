"""Fleet, SmpLink: connections that are given up, lose words, answer late; silence and sleep."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
import zmq.asyncio

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor import snapshots
from megatron_ft.supervisor.admission import admit
from megatron_ft.supervisor.cycle import CyclePhase, SnapshotCycle
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.schedule import Schedule
from megatron_ft.supervisor.smp_link import ARENA_TIMEOUT_SECONDS, SmpLink
from megatron_ft.supervisor.snapshots import SnapshotPump
from megatron_ft.supervisor.spec import raise_open_files
from tests.support.pumps import answer, pump

KEYS = JobKeys.derive(bytes(32))
NOBODY = "tcp://127.0.0.1:9"


async def test_who_waits_is_told_and_not_cancelled() -> None:
    context = zmq.asyncio.Context()
    link = SmpLink(context, "n0", NOBODY, KEYS, lambda event: None)
    answer = asyncio.create_task(link.ask(m.StatusRequest(), 30))
    await asyncio.sleep(0)
    while not link._pending:
        await asyncio.sleep(0.01)
    link.close()
    with pytest.raises(ControlPlaneError, match="n0 was given up"):
        await answer
    with pytest.raises(ControlPlaneError, match="n0 was given up"):
        await link.ask(m.StatusRequest(), 30)
    context.term()


async def test_permits_go_on_after_an_smp_was_replaced() -> None:
    """It was asked for its progress when its connection was given up."""
    of = pump()
    of.fleet.connect("n0", NOBODY)
    cycle = SnapshotCycle(1, {"dp0": "n0"}, (), Schedule(1))
    of.start(cycle)
    link = of.fleet.links["n0"]
    while len(link._pending) < 2:  # a heartbeat, and the one before a permit
        await asyncio.sleep(0.01)
    of.fleet.disconnect("n0")
    while cycle.phase != CyclePhase.CAPTURING:
        await asyncio.sleep(0.01)
    await of.fleet.close()


def test_a_coordinator_holds_more_nodes_than_libzmq_has_sockets_by_default() -> None:
    async def story() -> None:
        fleet = Fleet(KEYS, Observers(), Timing())
        try:
            for number in range(1100):
                fleet.connect(f"n{number}", NOBODY)
        finally:
            await fleet.close()

    raise_open_files()
    asyncio.run(asyncio.wait_for(story(), 100))


class Obedient(SmpLink):
    """An SMP that does what it is asked, and has no heartbeat."""

    async def ask(self, request: m.Message, timeout: float) -> Any:
        if isinstance(request, m.Lease):
            raise ControlPlaneError("no heartbeat")
        return m.Ok()


@pytest.mark.parametrize("late", [False, True])
async def test_the_next_permit_waits_for_nothing_but_the_last_capture(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look comes in time: what ends a capture that was missed must lead to the next one."""
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 1000.0)
    places = {"dp0": "n0", "dp1": "n1"}
    of = pump()
    of.fleet.link_type, of.fleet.incarnation = Obedient, 1
    for node in places.values():
        of.fleet.connect(node, NOBODY)
    cycle = SnapshotCycle(1, places, (), Schedule(1))
    of.start(cycle)
    for sequence in (1, 2, 3):
        while cycle.snapshot.sequence < sequence:
            await asyncio.sleep(0.001)
        for shard, node in places.items():
            of.fleet.take(m.NodeEvent(node, 1, m.Missed(shard, cycle.snapshot)))
            while late and shard == "dp0" and cycle.phase != CyclePhase.IDLE:
                await asyncio.sleep(0.001)
    await of.fleet.close()


class Overtaken(SmpLink):
    """An SMP whose answer to a heartbeat comes when another incarnation has begun."""

    fleet: Fleet

    async def ask(self, request: m.Message, timeout: float) -> Any:
        self.fleet.incarnation += 1
        return m.LeaseAnswer(self.node, True, {"dp0": 160}, "", 1.0)


async def test_a_heartbeat_of_the_last_incarnation_says_nothing_of_this_one() -> None:
    of = pump()
    of.fleet.link_type, Overtaken.fleet = Overtaken, of.fleet
    of.fleet.connect("n0", NOBODY)
    try:
        await of.fleet.refresh()
        assert not of.fleet.progress and not of.paused
    finally:
        await of.fleet.close()


class Losing(Obedient):
    """A connection that loses the first words that end a hold."""

    told: Counter[str] = Counter()

    async def ask(self, request: m.Message, timeout: float) -> Any:
        if isinstance(request, m.Unhold):
            self.told[self.node] += 1
            if self.node == "n1" and self.told[self.node] < 3:
                raise ControlPlaneError("no answer")
        return await super().ask(request, timeout)


async def test_a_hold_ends_though_the_word_is_lost() -> None:
    """A slot that stays held has no room for the snapshot after which the next drain would come."""
    Losing.told.clear()
    fleet = Fleet(KEYS, Observers(), Timing())
    fleet.link_type, fleet.incarnation = Losing, 1
    for node in ("n0", "n1"):
        fleet.connect(node, NOBODY)
    try:
        await fleet.release(["n0", "n1", "n2"])
    finally:
        await fleet.close()
    assert Losing.told == {"n0": 1, "n1": 3}


class Busy(SmpLink):
    """An SMP that makes a large arena for the incarnation before, and answers heartbeats
    meanwhile."""

    async def ask(self, request: m.Message, timeout: float) -> Any:
        self.last_heard = time.monotonic()
        if isinstance(request, m.Admit) and timeout <= ARENA_TIMEOUT_SECONDS:
            raise ControlPlaneError(f"no answer in {timeout} s")
        if isinstance(request, m.Admit):
            return m.Inventory(self.node, 0, ())
        raise ControlPlaneError("this one is lost")


async def test_a_node_that_makes_an_arena_is_not_lost() -> None:
    fleet = Fleet(KEYS, Observers(), Timing())
    fleet.link_type = Busy
    fleet.connect("n0", NOBODY)
    try:
        assert list(await admit(fleet, 1, ["n0"], {})) == ["n0"]
    finally:
        await fleet.close()


@pytest.mark.parametrize("incarnation", [1, 2, 3])
def test_what_is_told_of_another_incarnation_moves_nothing(incarnation: int) -> None:
    """A trainer of the last incarnation has ended: this one continues taking snapshots."""

    async def story() -> list[m.NodeEvent]:
        of = pump()
        of.fleet.incarnation = 2
        heard: list[m.NodeEvent] = []
        of.fleet.listen(heard.append)
        of.cycle = SnapshotCycle(2, {"dp0": "n0"}, (), Schedule(1))
        of.fleet.take(m.NodeEvent("n0", incarnation, m.WriterGone("trainer", "dp0", 7)))
        assert bool(of.cycle.propose(1, "")) == (incarnation != 2)
        await of.fleet.close()
        return heard

    assert len(asyncio.run(asyncio.wait_for(story(), 100))) == (incarnation == 2)


def joins(of: SnapshotPump, world: str, *nodes: str) -> None:
    for node in nodes:
        event = m.EncoderHello(1, world, of.fleet.incarnation)
        of.fleet.take(m.NodeEvent(node, of.fleet.incarnation, event))


def test_a_late_report_of_an_old_world_does_not_undo_the_joining_of_the_new_one() -> None:
    """Else it would never be up, and its encoders would wait for orders for ever."""
    killed: list[str] = []
    of = pump(kill=killed.append)
    of.encoders.expect("old", ("n0", "n1"))
    joins(of, "old", "n0", "n1")
    of.encoders.lost()
    of.encoders.expect("new", ("n0", "n1"))
    joins(of, "new", "n1")
    of.encoders.end("old", "the encoder on n1 died")
    joins(of, "new", "n0")
    assert of.encoders.usable == "new" and killed == ["old"]
    of.encoders.end("new", "the encoder on n1 died")
    assert of.encoders.usable == "" and killed == ["old", "new"]


STRIPE = m.StripeOrder(0, "xor", 1, 1, 64, 64, ("dp0", "dp1"), (0, 1), {}, {})


@pytest.mark.parametrize("lacking", ["room", "encoders", ""])
async def test_an_evacuation_waits_for_room_and_encoders_and_snapshots_continue(
    lacking: str,
) -> None:
    """The newest snapshot gets parity, which makes room; without encoders local ones are taken."""
    of = pump()
    of.fleet.connect("n0", NOBODY)
    of.fleet.incarnation, places = 2, {"dp0": "n0", "dp1": "n1"}
    cycle = SnapshotCycle(2, places, (STRIPE,), Schedule(4, 8))
    of.standing.commits(SnapshotId(1, 3), 8, "local")
    of.encoders.expect("world", ("n0", "n1"))
    if lacking != "encoders":
        joins(of, "world", "n0", "n1")
    if lacking == "room":
        of.fleet.take_answer(answer("n0", crowded=True))
    asked = asyncio.create_task(of.capture_and_stop(5, 30.0))
    await asyncio.sleep(0)
    sent = [action.message for action in of._next(cycle)]
    asked.cancel()
    # Else the end of its sockets is awaited for ever where the test fails.
    of.fleet.disconnect("n0")
    if lacking == "room":
        assert [(type(one), one.snapshot) for one in sent] == [(m.Encode, SnapshotId(1, 3))] * 2
    else:
        expected = (12, 0.0) if lacking else (15, 30.0)
        assert [(one.iteration, one.stay) for one in sent] == [expected] * 2


class Deaf(SmpLink):
    """An SMP that answers nothing, at once."""

    async def ask(self, request: m.Message, timeout: float) -> Any:
        await asyncio.sleep(0)
        raise ControlPlaneError("no answer")


async def test_a_node_is_silent_after_missed_heartbeats_and_not_after_a_sleep_of_ours() -> None:
    timing = Timing(heartbeat=0.05, lease=0.5, node_timeout=1.0)
    keys = JobKeys.derive(bytes(32))
    fleet = Fleet(keys, Observers(), timing)
    fleet.link_type = Deaf
    fleet.connect("n0", "tcp://127.0.0.1:9")
    await asyncio.sleep(0.02)
    time.sleep(2.0)  # as a process that is stopped
    await asyncio.sleep(0.02)
    assert fleet.silent_nodes(["n0"]) == []
    await fleet.alarm.wait()
    assert fleet.silent_nodes(["n0", "unknown"]) == ["n0"]
    fleet.links["n0"].missed = 0
    assert fleet.silent_nodes(["n0"]) == []
    await fleet.close()
