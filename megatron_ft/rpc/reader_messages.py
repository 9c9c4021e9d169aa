"""What a reader of snapshots (drain, export, verify) and an SMP say to each other."""

from __future__ import annotations

from megatron_ft.core.identity import Count, SnapshotId
from megatron_ft.rpc.message_base import Message, Name, Pid


class Pin(Message, frozen=True):
    """Keep the slots that hold ``snapshot`` from being reused; answered by Ok or Refused.

    ``reader`` is a name of the reader's own making, one for each pin.  The pin lasts until
    Unpin or the death of process ``pid``, and is void from the next incarnation on.
    """

    reader: Name
    snapshot: SnapshotId
    pid: Pid


class Errand(Message, frozen=True):
    """A process ``pid`` that the supervisor's life ``incarnation`` has started for a drain.

    It is ended when the lease runs out or another life is admitted.  Answered by Ok, or
    Refused when either has happened.
    """

    who: Name
    pid: Pid
    incarnation: Count


class Unpin(Message, frozen=True):
    """The reader has read what it wanted; answered by Ok, also when there is no such pin."""

    reader: Name
