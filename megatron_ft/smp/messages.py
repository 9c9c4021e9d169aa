"""Typed messages of the control plane, as msgspec structs in MessagePack.

Four conversations use them: trainer, encoder or reader and SMP (Unix socket), and
coordinator and SMP (TCP).  A message is one frame; its struct's tag says what it is.
Lengths are bytes.  Nothing here moves tensor bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_ft.decoding import UNREADABLE
from megatron_ft.errors import ControlPlaneError
from megatron_ft.smp.coordinator_messages import (
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
    Hold,
    Inventory,
    Lease,
    LeaseAnswer,
    Load,
    NodeReport,
    Pause,
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
from megatron_ft.smp.encoder_messages import (
    Encoded,
    EncodeOrder,
    EncoderHello,
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
from megatron_ft.smp.message_base import (
    Message,
    Ok,
    Refused,
)
from megatron_ft.smp.reader_messages import Errand, Pin, Unpin
from megatron_ft.smp.relay_messages import Gathered, Onward, Passed, PassOn
from megatron_ft.smp.trainer_messages import (
    Abandoned,
    CaptureCost,
    CorruptShard,
    Hello,
    Judged,
    Missed,
    Outcome,
    Prepare,
    Prepared,
    Restored,
    Sealed,
    Unfit,
    Welcome,
)
from megatron_ft.smp.watch_messages import PulseReport, Stacks, StacksRequest

__all__ = [
    "Abandoned",
    "Abort",
    "Admit",
    "Adopt",
    "ArenaReport",
    "ArenasReady",
    "BadBlocks",
    "CaptureCost",
    "Commit",
    "CorruptShard",
    "CreateArena",
    "Discard",
    "Encode",
    "EncodeOrder",
    "Encoded",
    "EncoderHello",
    "EncoderWelcome",
    "Event",
    "Gathered",
    "Grant",
    "Hello",
    "Hold",
    "Inventory",
    "Judged",
    "Lease",
    "LeaseAnswer",
    "Load",
    "Loaded",
    "Message",
    "Missed",
    "NodeReport",
    "Ok",
    "OrderDone",
    "OrderFailed",
    "Onward",
    "PassOn",
    "Passed",
    "Outcome",
    "Pause",
    "Pin",
    "Prepare",
    "Prepared",
    "PulseReport",
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
    "AnyMessage",
    "decode",
    "encode",
]

AnyMessage = (
    Ok
    | Refused
    | Hello
    | Welcome
    | Prepare
    | Prepared
    | Sealed
    | Judged
    | Missed
    | Abandoned
    | Restored
    | CorruptShard
    | Unfit
    | CaptureCost
    | Outcome
    | EncoderHello
    | EncoderWelcome
    | EncodeOrder
    | RebuildOrder
    | VerifyOrder
    | RepairOrder
    | Recomputed
    | Encoded
    | Rebuilt
    | Loaded
    | OrderDone
    | OrderFailed
    | Lease
    | LeaseAnswer
    | Admit
    | Inventory
    | Adopt
    | CreateArena
    | Grant
    | Encode
    | Rebuild
    | Load
    | Repair
    | Commit
    | Abort
    | RestoreReady
    | ArenasReady
    | Retire
    | Hold
    | Unhold
    | Event
    | PassOn
    | Passed
    | Gathered
    | Pause
    | Rewind
    | Discard
    | Pin
    | Errand
    | Unpin
    | StatusRequest
    | Status
    | StacksRequest
    | Stacks
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


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
