"""What an encoder and its SMP say to each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron_ft.arena.format import MAX_MEMBERS
from megatron_ft.core.identity import Hash, SealedRecord, ShardId, SnapshotId
from megatron_ft.rpc.message_base import Message, Name, Pid

Members = Annotated[tuple[SealedRecord, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
"""The records of a stripe's members, in order."""


class EncoderHello(Message, frozen=True):
    """An encoder of world ``world`` introduces itself and is watched through a pidfd.

    ``incarnation`` is the life that it was started for.
    """

    pid: Pid
    world: Name
    world_rank: int
    world_size: int
    incarnation: int


class EncoderWelcome(Message, frozen=True):
    """Answer to EncoderHello: what encoders need to open the node's arenas."""

    job: str
    node: str


class StripeOrder(msgspec.Struct, frozen=True):
    """One stripe's part of an order, the same on every encoder of the world.

    ``members`` are shard ids in stripe order, ``world_ranks`` where each one's
    encoder is, ``arenas`` maps the members of the receiving node to arena paths,
    ``slots`` to the slot that holds the snapshot there.
    """

    index: int
    kind: str
    data_members: int
    parity_members: int
    data_bytes: int
    block_bytes: int
    digest_algorithm: int
    members: tuple[str, ...]
    world_ranks: tuple[int, ...]
    arenas: dict[str, str]
    slots: dict[str, int]
    lost: tuple[str, ...] = ()


class EncodeOrder(Message, frozen=True):
    """SMP to encoder: compute the parity of these stripes, in this order."""

    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]


class RebuildOrder(Message, frozen=True):
    """SMP to encoder: recompute data and parity of the ``lost`` members of these stripes."""

    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]


class VerifyOrder(Message, frozen=True):
    """SMP to encoder: recompute parity and compare, change nothing."""

    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]


class RepairOrder(Message, frozen=True):
    """SMP to encoder: recompute these blocks of one member from the rest of its stripe."""

    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]
    shard_id: ShardId
    data_blocks: tuple[int, ...]
    parity_blocks: tuple[int, ...]


class Recomputed(Message, frozen=True):
    """Encoder to SMP: whole blocks of a damaged shard by number; ``left`` could not be had.

    Nothing is written yet: the SMP proves them against the slot's header and writes.
    """

    snapshot: SnapshotId
    world: str
    shard_id: ShardId
    data: dict[int, bytes]
    parity: dict[int, bytes]
    left: int


class Encoded(Message, frozen=True):
    """Encoder to SMP: this member's parity is complete and digested, its table known."""

    snapshot: SnapshotId
    world: str
    shard_id: ShardId
    parity_root: Hash
    stripe_table: Members
    bytes_sent: int
    seconds: float


class Rebuilt(Message, frozen=True):
    """Encoder to SMP: this lost member's data and parity are back and match their digests."""

    snapshot: SnapshotId
    world: str
    shard_id: ShardId
    record: SealedRecord
    parity_root: Hash
    stripe_table: Members
    bytes_sent: int
    seconds: float


class Loaded(Message, frozen=True):
    """Loader to SMP: this shard's data are back from disk and match their digests.

    Answered by Ok once that is stored, so that the loader may end.
    """

    world: str
    record: SealedRecord


class OrderDone(Message, frozen=True):
    """Encoder to SMP: every stripe of the order that touches this node is finished."""

    snapshot: SnapshotId
    world: str


class EncoderRefused(Message, frozen=True):
    """SMP to coordinator: an encoder of ``world`` was turned away, so the world cannot be up."""

    world: str
    reason: str


class OrderFailed(Message, frozen=True):
    """Encoder to SMP: the order cannot be finished; ``corrupt`` names a shard with bad bytes."""

    snapshot: SnapshotId
    world: str
    reason: str
    corrupt: str = ""
