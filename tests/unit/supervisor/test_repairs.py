"""Repairs as the coordinator leads them and as one SMP decides about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.smp.state_machine import MendSlot, StoreSlot, ToEncoder
from megatron_ft.supervisor.events import JobEvent, Observers
from megatron_ft.supervisor.repairs import MOST_ATTEMPTS, Repairs
from tests.support.node_machine import (
    COMMIT,
    ENCODE,
    ENCODED,
    GRANT,
    HERE,
    INCARNATION,
    ONE,
    PLACES,
    SEALED,
    TWO,
    WORLD,
    machine,
    ok,
)
from tests.support.node_machine import ORDERS as STRIPES

REPAIR = m.Repair(INCARNATION, ONE, WORLD, STRIPES, HERE, (3,), ())
RECOMPUTED = m.Recomputed(ONE, WORLD, HERE, {3: b"x"}, {}, 0)
DAMAGE = m.BadBlocks(HERE, ONE, (3,), (5,))


# One SMP.


def test_blocks_of_a_committed_slot_are_mended_before_it_is_given_away() -> None:
    node = machine()
    (order,) = [
        e for e in ok(node, GRANT, SEALED, ENCODE, ENCODED, COMMIT, REPAIR) if type(e) is ToEncoder
    ]
    assert isinstance(order.body, m.RepairOrder)
    assert order.body.stripes[0].slots == {HERE: 0} and order.body.data_blocks == (3,)
    node.take_effects()
    assert node.handle(RECOMPUTED) == m.Ok()
    given = m.Begins(HERE, TWO, 12, 1)
    for message in (m.Grant(INCARNATION, TWO, 12), given, m.Abort(INCARNATION, TWO, "test")):
        node.handle(message)
    first, *later = node.take_effects()
    assert isinstance(first, MendSlot) and first.header.record == SEALED.record
    assert any(isinstance(effect, StoreSlot) for effect in later)


def test_what_is_not_committed_or_has_no_parity_is_not_mended() -> None:
    node = machine()
    for message in (GRANT, SEALED):
        ok(node, message)
        assert isinstance(node.handle(REPAIR), m.Refused)
    ok(node, m.Commit(INCARNATION, ONE, "local"))
    answer = node.handle(REPAIR)
    assert isinstance(answer, m.Refused) and "no parity" in answer.reason
    assert isinstance(node.handle(RECOMPUTED), m.Refused)
    assert not any(isinstance(e, MendSlot | ToEncoder) for e in node.take_effects())


def test_blocks_of_another_world_or_a_slot_that_was_given_away_are_refused() -> None:
    node = machine()
    ok(node, GRANT, SEALED, ENCODE, ENCODED, COMMIT)
    late = m.Recomputed(ONE, "w1", HERE, {3: b"x"}, {}, 0)
    assert isinstance(node.handle(late), m.Refused)
    other = m.Recomputed(TWO, WORLD, HERE, {3: b"x"}, {}, 0)
    assert isinstance(node.handle(other), m.Refused)
    assert not any(isinstance(effect, MendSlot) for effect in node.take_effects())


# The coordinator.


class Control:
    """A coordinator whose nodes answer a repair by these events."""

    def __init__(self, *answers: m.Message, refuses: bool = False) -> None:
        self.incarnation, self.usable_world = INCARNATION, WORLD
        self.observers, self.told = Observers(), list[JobEvent]()
        self.observers.add(self.told.append)
        self.asked: list[m.Message] = []
        self.ended: list[str] = []
        self.on_event: Callable[[m.NodeEvent], None]
        self._answers, self._refuses = answers, refuses

    async def ask_all(self, requests: Mapping[str, m.Message]) -> dict[str, Any]:
        assert sorted(requests) == sorted(PLACES.values())
        self.asked += requests.values()
        if self._refuses:
            raise ControlPlaneError("n1: it has no slot with that snapshot")
        for answer in self._answers:
            self.on_event(m.NodeEvent("n0", INCARNATION, answer))  # type: ignore[arg-type]
        return {}

    def end_world(self, world: str, reason: str) -> None:
        self.ended.append(world)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.told]


def work(control: Control, damage: m.BadBlocks = DAMAGE, times: int = 1) -> Repairs:
    async def story() -> Repairs:
        repairs = Repairs(control)
        control.on_event = repairs.on_event
        for _ in range(times):
            repairs.on_event(m.NodeEvent("n0", INCARNATION, damage))
            while repairs.due:
                await asyncio.wait_for(repairs.work(STRIPES, PLACES), 10)
        return repairs

    return asyncio.run(story())


def test_a_repaired_shard_is_no_longer_lost() -> None:
    control = Control(m.Repaired(HERE, TWO, 9, 9), m.Repaired(HERE, ONE, 2, 0))
    repairs = work(control)
    assert control.kinds() == ["corrupt", "repaired"] and not repairs.lost
    assert (repairs.found, repairs.repaired) == (2, 2)
    request = control.asked[0]
    assert isinstance(request, m.Repair)
    assert (request.data_blocks, request.parity_blocks) == ((3,), (5,))


@pytest.mark.parametrize(
    "answer",
    [
        m.Repaired(HERE, ONE, 1, 1),
        m.OrderFailed(ONE, WORLD, "it broke"),
        m.WriterGone("encoder", WORLD, 7),
    ],
)
def test_what_was_not_repaired_counts_as_lost_and_is_said(answer: m.Message) -> None:
    control = Control(answer)
    repairs = work(control)
    assert control.kinds() == ["corrupt", "not_repaired"]
    assert repairs.lost == {(HERE, ONE)}


def test_what_is_told_late_of_another_world_ends_no_repair() -> None:
    control = Control(
        m.WriterGone("encoder", "w1", 7),
        m.WriterGone("trainer", WORLD, 7),
        m.OrderFailed(ONE, "w1", "it broke"),
        m.OrderFailed(TWO, WORLD, "it broke"),
        m.Repaired(HERE, ONE, 2, 0),
    )
    repairs = work(control)
    assert control.kinds() == ["corrupt", "repaired"] and not repairs.lost


def test_a_refusal_ends_the_world_in_which_some_may_wait() -> None:
    control = Control(refuses=True)
    assert work(control).lost == {(HERE, ONE)}
    assert control.ended == [WORLD] and "no slot" in control.told[-1].text


def test_more_damage_than_is_listed_is_not_taken_for_repaired() -> None:
    control = Control(m.Repaired(HERE, ONE, 2, 0))
    repairs = work(control, m.BadBlocks(HERE, ONE, (3,), (5,), more=70))
    assert repairs.lost == {(HERE, ONE)} and repairs.found == 72


def test_damage_that_is_reported_for_ever_is_tried_a_few_times() -> None:
    control = Control(m.Repaired(HERE, ONE, 0, 2))
    work(control, times=10)
    assert len(control.asked) == MOST_ATTEMPTS * len(PLACES)


def test_without_encoders_nothing_is_due_and_the_shard_counts_as_lost() -> None:
    control = Control()
    control.usable_world = ""
    repairs = work(control)
    assert repairs.lost == {(HERE, ONE)} and not control.asked
