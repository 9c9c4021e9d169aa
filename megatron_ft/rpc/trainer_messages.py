"""What a trainer and its SMP say to each other."""

from __future__ import annotations

from megatron_ft.core.fewer_ranks import RankRule
from megatron_ft.core.identity import Count, SealedRecord, ShardId, SnapshotId
from megatron_ft.rpc.message_base import Message, Pid


class Hello(Message, frozen=True):
    """A trainer introduces itself and is watched through a pidfd from here on.

    ``coordinates`` are its model-parallel coordinates without the data-parallel one;
    ``pid_namespace`` is where ``pid`` holds, 0 if that is not known.
    """

    pid: Pid
    rank: Count
    world_size: Count
    local_index: Count
    shard_id: ShardId
    coordinates: tuple[int, ...]
    incarnation: Count
    pid_namespace: Count = 0


class Welcome(Message, frozen=True):
    """Answer to Hello; with ``restore`` when the shard has a snapshot to load."""

    arena: str | None = None
    slot: int = 0
    restore: SealedRecord | None = None
    source: str = ""


class Prepare(Message, frozen=True):
    """The trainer's layout is planned; answered by Prepared once every arena exists.

    ``interval`` is the number of iterations between snapshots, 0 if the job is to find it;
    ``rank_rule`` says with how many ranks the command could go on, None: with as many only.
    """

    shard_id: ShardId
    layout_hash: bytes
    required_bytes: Count
    interval: Count
    rank_rule: RankRule | None = None


class Prepared(Message, frozen=True):
    """The arena is allocated in full and may be mapped."""

    arena: str


class Begins(Message, frozen=True):
    """The permitted iteration is over: the slot is wanted now; nothing is written to it before.

    There is no answer but the slot's header, which turns to CAPTURING, or a revoked permit.
    """

    shard_id: ShardId
    snapshot: SnapshotId
    iteration: Count
    slot: Count


class Sealed(Message, frozen=True):
    """All bytes and digests of the shard are in the granted slot; capture has ended.

    With ``judged_later`` the snapshot waits for this rank's Judged before it is protected.
    """

    record: SealedRecord
    judged_later: bool = False


class Judged(Message, frozen=True):
    """What the next loss says of a snapshot's state: ``problem`` is empty if it is good."""

    shard_id: ShardId
    snapshot: SnapshotId
    problem: str = ""


class Missed(Message, frozen=True):
    """The trainer passed the permitted iteration without capturing."""

    shard_id: ShardId
    snapshot: SnapshotId


class Abandoned(Message, frozen=True):
    """Capture has ended without a usable result; nothing is written to the slot any more."""

    shard_id: ShardId
    snapshot: SnapshotId
    reason: str


class Restored(Message, frozen=True):
    """The trainer has loaded its shard and goes on from there; answered with Noted."""

    shard_id: ShardId
    snapshot: SnapshotId
    seconds: float
    source: str


class Declined(Message, frozen=True):
    """The trainers have agreed to start without the snapshot that this one was offered.

    ``iteration`` is that of the checkpoint they start from, -1 if they start from scratch.
    """

    shard_id: ShardId
    snapshot: SnapshotId
    reason: str
    iteration: int = -1


class Noted(Message, frozen=True):
    """The SMP has sent a Restored on, so the coordinator hears it whatever becomes of the rank."""


class CorruptShard(Message, frozen=True):
    """The trainer found bytes that fail their digests, and loaded nothing."""

    shard_id: ShardId
    snapshot: SnapshotId
    blocks: int


class Unfit(Message, frozen=True):
    """The trainer's shard cannot take the snapshot, now or ever: starting again will not help.

    ``error`` names a class of megatron_ft.core.errors.
    """

    shard_id: ShardId
    error: str
    reason: str


class CaptureCost(Message, frozen=True):
    """How long one snapshot held the training thread, and how long its copy took.

    ``iteration_seconds`` is what an iteration usually takes without any, ``shadow_seconds`` by
    how much a snapshot usually makes its iterations longer without holding them; 0: unknown.
    """

    shard_id: ShardId
    snapshot: SnapshotId
    stall_seconds: float
    copy_seconds: float
    copied_bytes: int
    iteration_seconds: float = 0.0
    shadow_seconds: float = 0.0


class Outcome(Message, frozen=True):
    """SMP to trainer: a snapshot reached ``state``: protected, committed or aborted."""

    snapshot: SnapshotId
    state: str
