"""Reactions to encoders and to the loader of drained checkpoints."""

from __future__ import annotations

from typing import Any

from megatron_ft.rpc import messages as m
from megatron_ft.smp import slots as slot_changes
from megatron_ft.smp.node_shards import MendSlot, NodeShards, ToTrainer


def encoded(node: NodeShards, message: m.Encoded) -> m.Message:
    """The parity of one member is complete."""
    node.check_world(message.world)
    slots = node.slots_of(message.shard_id)
    slots.protect(message.snapshot, message.parity_root, message.stripe_table)
    node.tell(message)
    node.say(ToTrainer(message.shard_id, m.Outcome(message.snapshot, "protected")))
    return m.Ok()


def rebuilt(node: NodeShards, message: m.Rebuilt) -> m.Message:
    """A lost member is here again, its digests proven."""
    node.check_world(message.world)
    slots = node.slots_of(message.shard_id)
    slot_changes.rebuilt(slots, message.record, message.parity_root, message.stripe_table)
    node.tell(message)
    return m.Ok()


def loaded(node: NodeShards, message: m.Loaded) -> m.Message:
    """A shard was read from a drained checkpoint, its digests proven."""
    node.check_world(message.world)
    slot_changes.loaded(node.slots_of(message.record.shard_id), message.record)
    return m.Ok()


def recomputed(node: NodeShards, message: m.Recomputed) -> m.Message:
    """Bad blocks were solved from parity; whether they are right is proven before they are kept."""
    node.check_world(message.world)
    slots = node.slots_of(message.shard_id)
    index = slot_changes.repairable(slots, message.snapshot)
    node.say(MendSlot(message.shard_id, index, slots.slots[index], message))
    return m.Ok()


def order_ended(node: NodeShards, message: m.OrderDone | m.OrderFailed) -> m.Message:
    """The encoder waits for its next order."""
    node.tell(message)
    return m.Ok()


REACTIONS: dict[type[m.Message], Any] = {
    m.Encoded: encoded,
    m.Rebuilt: rebuilt,
    m.Loaded: loaded,
    m.Recomputed: recomputed,
    m.OrderDone: order_ended,
    m.OrderFailed: order_ended,
}
