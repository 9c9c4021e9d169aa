"""Every message of the control plane, and the one codec: msgspec structs in MessagePack.

Trainers, encoders and readers talk with their node's SMP (node_messages.py), SMPs with the
coordinator (job_messages.py), agents with the supervisor (agent_messages.py).  A message is one
frame; its struct's tag says what it is.  Lengths are bytes.  No message moves tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from megatron_ft.core.errors import UNREADABLE, ControlPlaneError, MegatronFTError, error_class
from megatron_ft.rpc.agent_messages import *  # noqa: F403
from megatron_ft.rpc.arena_messages import *  # noqa: F403
from megatron_ft.rpc.job_messages import *  # noqa: F403
from megatron_ft.rpc.node_messages import *  # noqa: F403
from megatron_ft.rpc.node_messages import Message


def _kinds(base: type[Message]) -> Iterator[type[Message]]:
    """The message types that have no subtypes."""
    for kind in base.__subclasses__():
        yield from _kinds(kind) if kind.__subclasses__() else (kind,)


MESSAGES: tuple[type[Message], ...] = tuple(_kinds(Message))
"""Types that a frame may hold."""


def _error_as_words(error: object) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _error_of_words(kind: type, words: object) -> MegatronFTError:
    """The error of this package with that name; ControlPlaneError for a name that is not ours."""
    name, text = msgspec.convert(words, tuple[str, str])
    return error_class(name)(text)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_error_as_words)
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    reduce(or_, MESSAGES), dec_hook=_error_of_words
)


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
