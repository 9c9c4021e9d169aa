"""What all control-plane messages are built on."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Ok(Message, frozen=True):
    """The request was carried out."""


class Refused(Message, frozen=True):
    """The request was not carried out; ``error`` names a class of megatron_ft.errors."""

    error: str
    reason: str
