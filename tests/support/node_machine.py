"""A node's state machine with one stripe, brought into each of its states."""

from __future__ import annotations

from megatron_ft.arena.format import Permit, SlotState
from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.effects import Effect, StorePermit
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.supervisor.orders import stripe_orders
from tests.protocol.model.memory import record_of

HERE, INCARNATION, WORLD = "dp0", 3, "w3"


ONE, TWO = SnapshotId(INCARNATION, 1), SnapshotId(INCARNATION, 2)


PLACES = {"dp0": "n0", "dp1": "n1", "dp2": "n2"}


STRIPE = StripeState("xor", 2, 1, 128, tuple(PLACES), 64)


ORDERS = stripe_orders([STRIPE], PLACES, list(PLACES.values()))


TABLE = tuple(record_of(ONE, shard, 10) for shard in PLACES)


ROOT = b"r".ljust(32)


def machine(*shards: str, slots: int = 2) -> NodeMachine:
    node = NodeMachine("n0", INCARNATION)
    for shard in shards or (HERE,):
        node.shards[shard] = ShardSlots(shard, [EMPTY_SLOT] * slots)
        node.paths[shard] = f"/arenas/{shard}"
        node.trainer_joined(shard)
    node.encoder_joined(WORLD)
    return node


def ok(node: NodeMachine, *messages: m.Message) -> list[Effect]:
    """Handle messages that must be accepted; the effects of the last one.

    Trainers begin as soon as they are permitted to.
    """
    for message in messages:
        node.take_effects()
        assert node.handle(message) == m.Ok()
        if isinstance(message, m.Grant):
            begin(node, message)
    return node.take_effects()


def begin(node: NodeMachine, grant: m.Grant) -> None:
    for shard, slots in node.shards.items():
        if slots.promise is not None:
            begins = m.Begins(shard, grant.snapshot, grant.iteration, slots.promise.slot)
            assert node.handle(begins) == m.Ok()


def state(node: NodeMachine, slot: int = 0) -> SlotState:
    return node.shards[HERE].slots[slot].state


GRANT = m.Grant(INCARNATION, ONE, 10)


SEALED = m.Sealed(TABLE[0])


ENCODE = m.Encode(INCARNATION, ONE, WORLD, ORDERS)


ENCODED = m.Encoded(ONE, WORLD, HERE, ROOT, TABLE, 0, 0.0)


COMMIT = m.Commit(INCARNATION, ONE, "protected")


def committed_twice() -> NodeMachine:
    """Two protected snapshots, ONE and TWO, in two slots, and a permit for THREE."""
    node = machine()
    ok(node, GRANT, SEALED, ENCODE, ENCODED, COMMIT)
    ok(node, m.Grant(INCARNATION, TWO, 12), m.Sealed(record_of(TWO, HERE, 12)))
    table = tuple(record_of(TWO, shard, 12) for shard in PLACES)
    ok(
        node,
        m.Encode(INCARNATION, TWO, WORLD, ORDERS),
        m.Encoded(TWO, WORLD, HERE, ROOT, table, 0, 0.0),
    )
    ok(node, m.Commit(INCARNATION, TWO, "protected"))
    assert node.handle(m.Grant(INCARNATION, THREE, 14)) == m.Ok()
    assert node.shards[HERE].promise is not None
    return node


THREE = SnapshotId(INCARNATION, 3)


BEGINS = m.Begins(HERE, THREE, 14, 0)


VOID = StorePermit(HERE, Permit(THREE, 14, 0, True))
