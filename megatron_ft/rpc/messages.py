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
from megatron_ft.rpc.job_messages import (
    Abort,
    Admit,
    Adopt,
    ArenaReport,
    ArenasReady,
    BadBlocks,
    Commit,
    CreateArena,
    Discard,
    Encode,
    Event,
    Grant,
    HeldSnapshot,
    Hold,
    Inventory,
    Lease,
    LeaseAnswer,
    Load,
    NodeReport,
    Pause,
    ReaderStalled,
    Rebuild,
    Repair,
    Repaired,
    RestoreReady,
    Retire,
    Rewind,
    ScrubCounts,
    SlotFreed,
    SlotReport,
    Status,
    StatusRequest,
    Unhold,
    WriterGone,
)
from megatron_ft.rpc.message_base import (
    Message,
    Ok,
    Refused,
)
from megatron_ft.rpc.node_messages import (
    Abandoned,
    Begins,
    CaptureCost,
    CorruptShard,
    Declined,
    Encoded,
    EncodeOrder,
    EncoderHello,
    EncoderRefused,
    EncoderWelcome,
    Errand,
    Hello,
    Loaded,
    Missed,
    Noted,
    OrderDone,
    OrderFailed,
    Outcome,
    Pin,
    Prepare,
    Prepared,
    PulseReport,
    RebuildOrder,
    Rebuilt,
    Recomputed,
    RepairOrder,
    Restored,
    Sealed,
    Stacks,
    StacksRequest,
    StripeOrder,
    Unfit,
    Unpin,
    VerifyOrder,
    Welcome,
)

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
