"""Reactions to readers: drains, exports, verification."""

from __future__ import annotations

from typing import Any

from megatron_ft.rpc import messages as m
from megatron_ft.smp.node_shards import NodeShards


def pin(node: NodeShards, message: m.Pin | m.Hold) -> m.Message:
    """Keep a snapshot of every shard here until the reader is done, or nothing of it."""
    for slots in node.shards.values():
        slots.check_pinnable(message.snapshot)
    for slots in node.shards.values():
        slots.pin(message.reader, message.snapshot)
    return m.Ok()


def unpin(node: NodeShards, message: m.Unpin | m.Unhold) -> m.Message:
    """The reader is done."""
    drop_reader(node, message.reader)
    return m.Ok()


def drop_reader(node: NodeShards, reader: str) -> None:
    """What the reader held may be reused."""
    for slots in node.shards.values():
        slots.unpin(reader)


def readers(node: NodeShards) -> list[str]:
    """Names of the readers that hold some snapshot here."""
    return sorted({reader for slots in node.shards.values() for reader in slots.pins})


def held_back(node: NodeShards) -> bool:
    """Whether readers are all that is in the way of a Grant."""
    free = all(
        slots.may_grant() or slots.held_back() or slots.crowded() for slots in node.shards.values()
    )
    return free and any(slots.held_back() for slots in node.shards.values())


REACTIONS: dict[type[m.Message], Any] = {
    m.Pin: pin,
    m.Unpin: unpin,
    m.Hold: pin,
    m.Unhold: unpin,
}
