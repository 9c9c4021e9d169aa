"""Reactions to trainers."""

from __future__ import annotations

from typing import Any

from megatron_ft.smp import messages as m
from megatron_ft.smp.node_shards import NodeShards


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
    m.Sealed: sealed,
    m.Missed: gave_up,
    m.Abandoned: gave_up,
}
