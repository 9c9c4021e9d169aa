"""A permit that cannot be redeemed ends, and the next one is given."""

from __future__ import annotations

from megatron_ft.arena.format import SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.effects import ToCoordinator
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.supervisor.cycle import Action, CyclePhase, Send, SnapshotCycle
from megatron_ft.supervisor.schedule import Schedule
from tests.support.node_machine import (
    BEGINS,
    HERE,
    INCARNATION,
    ONE,
    THREE,
    VOID,
    committed_twice,
    ok,
    state,
)


def deliver(cycle: SnapshotCycle, node: NodeMachine, actions: list[Action]) -> None:
    """Carry messages between the coordinator's cycle and a node until there are none."""
    while actions:
        action = actions.pop(0)
        if isinstance(action, Send):
            actions += cycle.answered("n0", action.message, node.handle(action.message))
        for effect in node.take_effects():
            if isinstance(effect, ToCoordinator):
                actions += cycle.handle("n0", effect.body)


def test_a_reader_between_permit_and_begin_costs_one_snapshot_and_no_more() -> None:
    node = committed_twice()
    ok(node, m.Abort(INCARNATION, THREE, "the test has its own"))
    cycle = SnapshotCycle(INCARNATION, {HERE: "n0"}, (), Schedule(2))
    cycle._sequence = THREE.sequence
    deliver(cycle, node, cycle.propose(14, ""))
    promise = node.shards[HERE].promise
    assert promise is not None and promise.snapshot == cycle.snapshot
    ok(node, m.Hold(INCARNATION, "drain", ONE))
    begins = m.Begins(HERE, cycle.snapshot, promise.iteration, promise.slot)
    assert isinstance(node.handle(begins), m.Refused)
    actions: list[Action] = []
    assert node.handle(m.Abandoned(HERE, cycle.snapshot, "its permit was revoked")) == m.Ok()
    for effect in node.take_effects():
        if isinstance(effect, ToCoordinator):
            actions += cycle.handle("n0", effect.body)
    deliver(cycle, node, actions)
    assert cycle.phase == CyclePhase.IDLE and cycle.ready
    ok(node, m.Unhold(INCARNATION, "drain"))
    deliver(cycle, node, cycle.propose(16, ""))
    promise = node.shards[HERE].promise
    assert promise is not None and promise.snapshot == cycle.snapshot
    ok(node, m.Begins(HERE, cycle.snapshot, promise.iteration, promise.slot))
    assert state(node, promise.slot) == SlotState.CAPTURING


def test_a_stale_begin_does_not_void_the_permit_of_a_running_capture() -> None:
    node = committed_twice()
    ok(
        node,
        m.Abort(INCARNATION, THREE, "test"),
        m.Grant(INCARNATION, SnapshotId(INCARNATION, 4), 16),
    )
    node.take_effects()
    assert isinstance(node.handle(BEGINS), m.Refused)
    assert VOID not in node.take_effects()
