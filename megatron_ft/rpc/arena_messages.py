"""Messages by which arenas give way to larger ones while trainers train."""

from __future__ import annotations

from megatron_ft.core.identity import Count, ShardId, SnapshotId
from megatron_ft.rpc.node_messages import Message


class Outgrown(Message, frozen=True):
    """The trainer's state has no room in its arena; with ``required_bytes`` it has, and can grow.

    It comes again with each snapshot that is given up for it.
    """

    shard_id: ShardId
    required_bytes: Count


class Renewed(Message, frozen=True):
    """SMP to trainer: its arena is another file now, to be used from a boundary of its own on.

    It may come again; answered by Attached.
    """

    arena: str


class Attached(Message, frozen=True):
    """The trainer has mapped its new arena, and captures into it."""

    shard_id: ShardId


class Unattached(Message, frozen=True):
    """The trainer cannot use its new arena and captures nothing; Renewed has it try again."""

    shard_id: ShardId
    reason: str


class CheckRoom(Message, frozen=True):
    """Ask if arenas of ``room`` bytes could be made here beside those that SetAside leaves.

    Refused with ArenaMemoryError if not; nothing is changed.
    """

    incarnation: Count
    spared: tuple[SnapshotId, ...]
    room: Count


class RoomRequest(Message, frozen=True):
    """Ask how much memory arenas could be given on this node; answered by Room."""

    incarnation: Count


class Room(Message, frozen=True):
    """Bytes that the tightest limit of the node leaves, 0 or less if none are.

    ``limit`` says in words what it is.  Nodes of one ``machine`` share its memory.
    """

    available: int
    limit: str
    machine: str


class SetAside(Message, frozen=True):
    """Make all arenas of the node sources, which keep these snapshots, as larger ones come.

    Arenas that come after others which are sources already hold nothing that is needed: they go.
    No trainer writes to any of them.
    """

    incarnation: Count
    spared: tuple[SnapshotId, ...]


class TellRenewed(Message, frozen=True):
    """Tell the trainers of the node, by Renewed, where their arenas are now."""

    incarnation: Count
