"""Typed messages of the control plane, as msgspec structs in MessagePack.

Four conversations use them: trainer, encoder or reader and SMP (Unix socket), and
coordinator and SMP (TCP).  A message is one frame; its struct's tag says what it is.
Lengths are bytes.  Nothing here moves tensor bytes.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc.encoder_messages import (
    Encoded,
    EncodeOrder,
    EncoderHello,
    EncoderRefused,
    EncoderWelcome,
    Loaded,
    OrderDone,
    OrderFailed,
    RebuildOrder,
    Rebuilt,
    Recomputed,
    RepairOrder,
    StripeOrder,
    VerifyOrder,
)
from megatron_ft.rpc.event_messages import (
    BadBlocks,
    Event,
    NodeReport,
    ReaderStalled,
    Repaired,
    SlotFreed,
    WriterGone,
)
from megatron_ft.rpc.lease_messages import HeldSnapshot, Lease, LeaseAnswer
from megatron_ft.rpc.message_base import (
    Message,
    Ok,
    Refused,
)
from megatron_ft.rpc.reader_messages import Errand, Pin, Unpin
from megatron_ft.rpc.recovery_messages import (
    Admit,
    Adopt,
    ArenaReport,
    ArenasReady,
    CreateArena,
    Inventory,
    Load,
    Rebuild,
    RestoreReady,
    Retire,
    SlotReport,
)
from megatron_ft.rpc.snapshot_messages import Abort, Commit, Encode, Grant, Hold, Repair, Unhold
from megatron_ft.rpc.status_messages import (
    Discard,
    Pause,
    Rewind,
    ScrubCounts,
    Status,
    StatusRequest,
)
from megatron_ft.rpc.trainer_messages import (
    Abandoned,
    Begins,
    CaptureCost,
    CorruptShard,
    Declined,
    Hello,
    Judged,
    Missed,
    Noted,
    Outcome,
    Prepare,
    Prepared,
    Restored,
    Sealed,
    Unfit,
    Welcome,
)
from megatron_ft.rpc.watch_messages import PulseReport, Stacks, StacksRequest

__all__ = [
    "Abandoned",
    "Abort",
    "Admit",
    "Adopt",
    "ArenaReport",
    "ArenasReady",
    "BadBlocks",
    "Begins",
    "CaptureCost",
    "Commit",
    "CorruptShard",
    "Declined",
    "CreateArena",
    "Discard",
    "Encode",
    "EncodeOrder",
    "Encoded",
    "EncoderHello",
    "EncoderRefused",
    "EncoderWelcome",
    "Event",
    "Grant",
    "Hello",
    "Hold",
    "Inventory",
    "Judged",
    "HeldSnapshot",
    "Lease",
    "LeaseAnswer",
    "Load",
    "Loaded",
    "Message",
    "Missed",
    "NodeReport",
    "Noted",
    "Ok",
    "OrderDone",
    "OrderFailed",
    "Outcome",
    "Pause",
    "Pin",
    "Prepare",
    "Prepared",
    "PulseReport",
    "ReaderStalled",
    "Rebuild",
    "RebuildOrder",
    "Rebuilt",
    "Recomputed",
    "Repair",
    "RepairOrder",
    "Repaired",
    "Refused",
    "RestoreReady",
    "Restored",
    "Retire",
    "Rewind",
    "ScrubCounts",
    "Sealed",
    "SlotFreed",
    "SlotReport",
    "Stacks",
    "StacksRequest",
    "Status",
    "StatusRequest",
    "StripeOrder",
    "Unfit",
    "Unhold",
    "Errand",
    "Unpin",
    "VerifyOrder",
    "Welcome",
    "WriterGone",
    "MESSAGES",
    "decode",
    "encode",
]

MESSAGES: tuple[type[Message], ...] = tuple(
    found
    for name in __all__
    if isinstance(found := globals().get(name), type)
    and issubclass(found, Message)
    and found is not Message
)
"""Types that a frame may hold: all of the names above that are messages."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(or_, MESSAGES))


def encode(message: Message) -> bytes:
    """One message as one frame."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Any:
    """The message in a frame; ControlPlaneError if it is not one of ours."""
    try:
        return _DECODER.decode(frame)
    except UNREADABLE as error:
        reason = f"unreadable control message of {len(frame)} bytes: {error}"
        raise ControlPlaneError(reason) from error
