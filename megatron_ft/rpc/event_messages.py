"""What an SMP tells the coordinator unasked."""

from __future__ import annotations

from megatron_ft.core.identity import Count, SnapshotId
from megatron_ft.rpc.encoder_messages import (
    Encoded,
    EncoderHello,
    EncoderRefused,
    OrderDone,
    OrderFailed,
    Rebuilt,
)
from megatron_ft.rpc.message_base import Message
from megatron_ft.rpc.trainer_messages import (
    Abandoned,
    CaptureCost,
    CorruptShard,
    Declined,
    Hello,
    Judged,
    Missed,
    Prepare,
    Restored,
    Sealed,
    Unfit,
)


class BadBlocks(Message, frozen=True):
    """The scrub found blocks of a committed snapshot that fail their digests.

    Numbers count blocks of the slot's data and parity region; ``more`` were not listed.
    """

    shard_id: str
    snapshot: SnapshotId
    data_blocks: tuple[int, ...]
    parity_blocks: tuple[int, ...]
    more: int = 0


class Repaired(Message, frozen=True):
    """So many blocks were recomputed, proved and written back; ``left`` could not be."""

    shard_id: str
    snapshot: SnapshotId
    blocks: int
    left: int


class WriterGone(Message, frozen=True):
    """A registered trainer or encoder has died; ``who`` is its shard id or world."""

    role: str
    who: str
    pid: int


class SlotFreed(Message, frozen=True):
    """An aborted slot is free: its writer has stopped."""

    shard_id: str
    snapshot: SnapshotId


class ReaderStalled(Message, frozen=True):
    """A reader, or a process of a drain, has not run for long: its pin is dropped."""

    reader: str
    seconds: float


Told = (
    Hello
    | Prepare
    | Sealed
    | Judged
    | Missed
    | Abandoned
    | Restored
    | Declined
    | CorruptShard
    | Unfit
    | CaptureCost
    | EncoderHello
    | EncoderRefused
    | Encoded
    | Rebuilt
    | OrderDone
    | OrderFailed
    | WriterGone
    | ReaderStalled
    | SlotFreed
    | BadBlocks
    | Repaired
)
"""What an SMP tells the coordinator unasked."""


class NodeReport(Message, frozen=True):
    """Several things that happened on one node, in this order."""

    bodies: tuple[Told, ...]


class Event(Message, frozen=True):
    """Something happened on ``node``; ``body`` is one of the messages of this module.

    ``first`` is its number, or that of the first thing of a report, in the SMP's ``stream`` of
    events (upward.py).
    """

    node: str
    incarnation: int
    body: Told | NodeReport
    stream: Count = 0
    first: Count = 1
