"""What a reader of snapshots (drain, export, verify) and an SMP say to each other."""

from __future__ import annotations

from megatron_ft.identity import SnapshotId
from megatron_ft.smp.message_base import Message


class Pin(Message, frozen=True):
    """Keep the slots that hold ``snapshot`` from being reused; answered by Ok or Refused.

    ``reader`` is a name of the reader's own making, one for each pin.  The pin lasts until
    Unpin or the death of process ``pid``, and is void from the next incarnation on.
    """

    reader: str
    snapshot: SnapshotId
    pid: int


class Unpin(Message, frozen=True):
    """The reader has read what it wanted; answered by Ok, also when there is no such pin."""

    reader: str
