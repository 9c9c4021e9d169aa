"""Reactions to trainers."""

from __future__ import annotations

from typing import Any

from megatron_ft.arena.format import Permit
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.node_messages import TransitionRefusedError
from megatron_ft.smp.node_shards import NodeShards, StorePermit
from megatron_ft.smp.slot_rules import capturing


def begins(node: NodeShards, message: m.Begins) -> m.Message:
    """The trainer wants the slot that it was promised; without one its permit is void."""
    slots = node.slots_of(message.shard_id)
    try:
        slots.begin_capture(message.snapshot)
    except TransitionRefusedError:
        # The one permit word may be that of a newer snapshot, which must stay valid.
        theirs = slots.promise is None or slots.promised(message.snapshot)
        if theirs and not capturing(slots.slots) and message.slot < len(slots.slots):
            void = Permit(message.snapshot, message.iteration, message.slot, True)
            node.say(StorePermit(message.shard_id, void))
        raise
    return m.Ok()


def sealed(node: NodeShards, message: m.Sealed) -> m.Message:
    """The trainer has captured its whole shard, digests included."""
    record = message.record
    if node.slots_of(record.shard_id).seal(record):
        node.tell(message)
    else:
        node.tell(m.SlotFreed(record.shard_id, record.snapshot))
    return m.Ok()


def gave_up(node: NodeShards, message: m.Missed | m.Abandoned) -> m.Message:
    """The trainer does not write to this snapshot's slot, or not any more."""
    if node.slots_of(message.shard_id).capture_ended(message.snapshot):
        node.tell(message)
    return m.Ok()


REACTIONS: dict[type[m.Message], Any] = {
    m.Begins: begins,
    m.Sealed: sealed,
    m.Missed: gave_up,
    m.Abandoned: gave_up,
}
