"""What all control-plane messages are built on."""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_BYTES = 64 << 20
"""Longest frame that an SMP takes: who claims more is cut off before any memory is given to it.

The longest of ours hold the stripes of a whole job, some 100 bytes a rank, or the recomputed
blocks of one report, 64 of 512 KiB.
"""

Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
"""The number of a process; the kernel gives none above (proc(5), pid_max)."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""What a peer calls itself, or the world that it is of."""


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""How long something lasts."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Ok(Message, frozen=True):
    """The request was carried out."""


class Refused(Message, frozen=True):
    """The request was not carried out; ``error`` names a class of megatron_ft.core.errors."""

    error: str
    reason: str
