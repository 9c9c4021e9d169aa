"""What the coordinator and an SMP say to each other with every heartbeat."""

from __future__ import annotations

from typing import NamedTuple

from megatron_ft.core.identity import Count, Iteration, SnapshotId
from megatron_ft.rpc.message_base import Message, Seconds
from megatron_ft.rpc.watch_messages import PulseReport


class Lease(Message, frozen=True):
    """Heartbeat of the coordinator: valid ``seconds`` from ``heard``, then trainers are killed.

    ``heard`` is the newest ``clock`` that the coordinator has had from this SMP, 0 for none,
    which grants nothing.  So a lease that lay in a queue, or that comes through while no
    answer does, is not longer than the coordinator knows.  ``summary`` are those parts of the
    job's summary (job_summary.py) that the node does not have.  ``scrub_percent`` is the share of
    one core that the node's scrub may use, 0 for none.  ``told``: events of the node's ``stream``
    up to this number have arrived.
    """

    incarnation: Count
    seconds: Seconds
    heard: float = 0.0
    summary: dict[str, bytes] = {}
    scrub_percent: float = 0.0
    stream: Count = 0
    told: Count = 0


class HeldSnapshot(NamedTuple):
    """A committed snapshot; ``protected`` if all of its shards here have parity."""

    snapshot: SnapshotId
    iteration: Iteration
    protected: bool


class LeaseAnswer(Message, frozen=True):
    """Heartbeat of the SMP.  ``progress`` maps shard ids to their last finished iteration.

    ``clock`` is the node's monotonic clock, in seconds.
    ``pinned`` says that a Grant would be refused now, only because readers hold snapshots,
    ``crowded`` that the last protected snapshot is in the way.  ``held`` is what all shards of the
    node have committed.
    ``rewind`` is what the user has asked for and whoever leads now has not acted on yet.
    ``pulses`` maps shard ids to their trainers' signs of life, ``summary`` the parts of the
    job's summary that the node has to their digests.
    """

    node: str
    paused: bool
    progress: dict[str, int]
    encoder_world: str
    resident_bytes: int
    clock: float
    pinned: bool = False
    rewind: int | None = None
    pulses: dict[str, PulseReport] = {}
    summary: dict[str, bytes] = {}
    crowded: bool = False
    held: tuple[HeldSnapshot, ...] = ()
