"""What the command line asks an SMP."""

from __future__ import annotations

import msgspec

from megatron_ft.core.identity import Iteration
from megatron_ft.rpc.message_base import Message
from megatron_ft.rpc.recovery_messages import ArenaReport


class Pause(Message, frozen=True):
    """Stop (or start again) permits for new snapshots, in the whole job."""

    paused: bool


class Rewind(Message, frozen=True):
    """Have the job go on from before this iteration; passed on with the next heartbeat."""

    before: Iteration


class Discard(Message, frozen=True):
    """Free the arenas and exit: for a job that nobody supervises any more."""


class StatusRequest(Message, frozen=True):
    """Ask for the node's own view and the job summary that the coordinator last sent."""


class ScrubCounts(msgspec.Struct, frozen=True):
    """What a node's scrub has done since its SMP started.

    ``passes`` counts reads of everything that was committed; ``records`` are copies of
    headers that were damaged and written anew.
    """

    passes: int = 0
    bytes_read: int = 0
    bad_blocks: int = 0
    repaired_blocks: int = 0
    records: int = 0


class Status(Message, frozen=True):
    """Answer to StatusRequest; ``summary`` is JSON of the coordinator's view, maybe empty."""

    node: str
    pid: int
    incarnation: int
    paused: bool
    lease_seconds_left: float
    resident_bytes: int
    arenas: tuple[ArenaReport, ...]
    progress: dict[str, int]
    summary: bytes
    scrub: ScrubCounts = ScrubCounts()
