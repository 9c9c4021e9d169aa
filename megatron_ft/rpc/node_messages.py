"""Messages within one node: trainers, encoders and readers of snapshots with their SMP.

The base of all messages is here too.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron_ft.arena.format import MAX_MEMBERS
from megatron_ft.core.environment import StartKind
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.identity import (
    Count,
    Hash,
    Iteration,
    RankRule,
    SealedRecord,
    ShardId,
    SnapshotId,
)

Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
"""A process number; the kernel gives none above (proc(5), pid_max)."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""The name of a peer, or of the world that it belongs to."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A duration."""

REPLICA_DIGEST_BYTES = 8
"""Length of one digest in ReplicaDigests."""

Members = Annotated[tuple[SealedRecord, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
"""The records of a stripe's members, in order."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Ok(Message, frozen=True):
    """The request was carried out."""


class Refused(Message, frozen=True):
    """The request was not carried out; ``error`` is raised again on the other side."""

    error: MegatronFTError

    @property
    def reason(self) -> str:
        """The error's text."""
        return str(self.error)


class Hello(Message, frozen=True):
    """A trainer introduces itself and is watched through a pidfd from here on.

    ``coordinates`` are its model-parallel coordinates without the data-parallel one;
    ``pid_namespace`` is where ``pid`` holds, 0 if that is not known; ``start`` is how it came up,
    ``why_cold`` why it did not start warm; ``versions`` are those of imported packages.
    """

    pid: Pid
    rank: Count
    local_index: Count
    shard_id: ShardId
    coordinates: tuple[int, ...]
    incarnation: Count
    pid_namespace: Count = 0
    start: StartKind = "cold"
    versions: dict[str, str] = {}
    why_cold: str = ""


class Welcome(Message, frozen=True):
    """Answer to Hello; with ``restore`` when the shard has a snapshot to load.

    ``reshaped`` is a snapshot of another layout, of ``iteration``: Prepared brings its shard.
    """

    arena: str | None = None
    slot: int = 0
    restore: SealedRecord | None = None
    source: str = ""
    reshaped: SnapshotId | None = None
    iteration: Iteration = -1


class Restartable(Message, frozen=True):
    """A trainer announces that it can enter its training function again in its process.

    Sent once, over a connection that lasts as long as the process; answered by Ok.
    """

    pid: Pid
    rank: Count


class LetGo(Message, frozen=True):
    """SMP to a restartable trainer: end training and unmap every arena; ``incarnation`` comes."""

    incarnation: Count


class Released(Message, frozen=True):
    """Answer to LetGo: training has ended, and this process maps no arena.

    The SMP looks at the process first (smp/survivors.py).  ``unfit``: it cannot train again, why.
    """

    rank: Count
    incarnation: Count
    unfit: str = ""


class Reenter(Message, frozen=True):
    """SMP to a trainer that was released: train again, with these environment variables."""

    incarnation: Count
    environment: dict[str, str]


class Prepare(Message, frozen=True):
    """The trainer's layout is planned; answered by Prepared once every arena exists.

    ``interval`` is the number of iterations between snapshots, 0 if the job is to find it;
    ``rank_rule`` gives the numbers of ranks with which the command could resume, None: this one.
    """

    shard_id: ShardId
    required_bytes: Count
    interval: Count
    rank_rule: RankRule | None = None


class Prepared(Message, frozen=True):
    """The arena is allocated in full and may be mapped.

    ``restore`` is the shard that was reshaped for this trainer, in ``slot``.
    """

    arena: str
    slot: int = 0
    restore: SealedRecord | None = None


class Begins(Message, frozen=True):
    """The permitted iteration is over: the slot is wanted now; nothing is written to it before.

    There is no answer but the slot's header, which turns to CAPTURING, or a revoked permit.
    """

    shard_id: ShardId
    snapshot: SnapshotId
    iteration: Count
    slot: Count


class ReplicaDigests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of live tensors of which the ranks of a process group hold replicas.

    ``group`` stands for the ranks and the tensors' names, ``digests`` are in the order of names.
    One rank of the group gives the ``names`` at first, too: a part may be several small tensors.
    """

    group: Name
    digests: bytes
    names: tuple[str, ...] = ()


class Sealed(Message, frozen=True):
    """All bytes and digests of the shard are in the granted slot; capture has ended.

    ``replicas`` are digests of what other ranks must have alike, where snapshots are compared.
    """

    record: SealedRecord
    replicas: tuple[ReplicaDigests, ...] = ()


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
    """The trainer has loaded its shard and continues from there; answered with Noted."""

    shard_id: ShardId
    snapshot: SnapshotId


class Declined(Message, frozen=True):
    """The trainers have agreed to start without the snapshot that this one was offered.

    ``iteration`` is that of the checkpoint they start from, -1 if they start from scratch.
    """

    shard_id: ShardId
    snapshot: SnapshotId
    reason: str
    iteration: int = -1


class Ending(Message, frozen=True):
    """A trainer leaves after ``iteration``; is its program's plan done?  Answered with Noted."""

    shard_id: ShardId
    iteration: Iteration
    finished: bool


class Noted(Message, frozen=True):
    """Answer to Restored and Ending: it reaches the coordinator, whatever becomes of the rank."""


class CorruptShard(Message, frozen=True):
    """The trainer found bytes that fail their digests, and loaded nothing."""

    shard_id: ShardId
    snapshot: SnapshotId
    blocks: int


class Unfit(Message, frozen=True):
    """The trainer's shard cannot take the snapshot, now or ever: starting again will not help."""

    shard_id: ShardId
    error: MegatronFTError


class CaptureCost(Message, frozen=True):
    """Cost of one snapshot: how long it held the training thread, and how long its copy took.

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


class Slowed(Message, frozen=True):
    """Trainer to coordinator: the number of iterations up to ``iteration`` that a snapshot made
    late; 0 says that one may have been."""

    shard_id: ShardId
    iteration: int
    late: Count


class SnapshotOutcome(Message, frozen=True):
    """SMP to trainer: a snapshot reached ``state``: protected, committed or aborted."""

    snapshot: SnapshotId
    state: str


class EncoderHello(Message, frozen=True):
    """An encoder of world ``world`` introduces itself and is watched through a pidfd.

    ``incarnation`` is the incarnation that it was started for.
    """

    pid: Pid
    world: Name
    incarnation: int


class EncoderWelcome(Message, frozen=True):
    """Answer to EncoderHello: what encoders need to open the node's arenas."""

    job: str
    node: str


class StripeOrder(msgspec.Struct, frozen=True):
    """One stripe's part of an order, the same on every encoder of the world.

    ``members`` are shard ids in stripe order, ``world_ranks`` where each one's
    encoder is, ``arenas`` maps the members of the receiving node to arena paths,
    ``slots`` to the slot that holds the snapshot there.
    """

    index: int
    kind: str
    data_members: int
    parity_members: int
    data_bytes: int
    block_bytes: int
    members: tuple[str, ...]
    world_ranks: tuple[int, ...]
    arenas: dict[str, str]
    slots: dict[str, int]
    lost: tuple[str, ...] = ()


class EncoderOrder(Message, frozen=True):
    """Base of an SMP's orders to its encoder: stripes, in this order, for one snapshot."""

    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]


class EncodeOrder(EncoderOrder, frozen=True):
    """Compute the parity of these stripes."""


class RebuildOrder(EncoderOrder, frozen=True):
    """Recompute data and parity of the ``lost`` members of these stripes."""


class PlacedShard(msgspec.Struct, frozen=True, array_like=True):
    """Place of a shard's bytes on the receiving node: arena, slot, and file of its layout."""

    arena: str
    slot: int
    layout: str = ""


def layout_path(arena: str) -> str:
    """Path of the file in which a trainer gives the layout that its shard is reshaped to."""
    return f"{arena.removesuffix('.arena')}.layout"


class ReshapeOrder(Message, frozen=True):
    """Fill shards of a new layout from those of ``source``, an older snapshot of another.

    The same on every encoder of the world but for the last two fields.  ``ranks`` maps the old
    shards to the encoder that holds each; ``held`` are those of the receiving node, ``new`` the
    shards to fill there.
    """

    snapshot: SnapshotId
    world: str
    iteration: Count
    source: SnapshotId
    ranks: dict[str, Count]
    held: dict[str, PlacedShard]
    new: dict[str, PlacedShard]


class Reshaped(Message, frozen=True):
    """Encoder to SMP: this shard of a new layout is filled and sealed.

    ``storage_bytes_read`` is what the encoder has read from storage since the report before this
    one of the same order; None where the kernel does not count it.
    """

    world: str
    record: SealedRecord
    bytes_needed: Count
    bytes_received: Count
    storage_bytes_read: Count | None


class Encoded(Message, frozen=True):
    """Encoder to SMP: this member's parity is complete and digested, its table known."""

    snapshot: SnapshotId
    world: str
    shard_id: ShardId
    parity_root: Hash
    stripe_table: Members
    bytes_sent: int
    seconds: float


class Rebuilt(Message, frozen=True):
    """Encoder to SMP: this lost member's data and parity are back and match their digests."""

    snapshot: SnapshotId
    world: str
    shard_id: ShardId
    record: SealedRecord
    parity_root: Hash
    stripe_table: Members
    bytes_sent: int
    seconds: float


class Loaded(Message, frozen=True):
    """Loader to SMP: this shard's data are back from disk and match their digests.

    Answered by Ok once that is stored, so that the loader may end.
    """

    world: str
    record: SealedRecord


class OrderDone(Message, frozen=True):
    """Encoder to SMP: every stripe of the order that touches this node is finished."""

    snapshot: SnapshotId
    world: str


class EncoderWaits(Message, frozen=True):
    """SMP to coordinator: an encoder of ``world`` is up, for an incarnation that is not yet."""

    world: str


class EncoderRefused(Message, frozen=True):
    """SMP to coordinator: an encoder of ``world`` was turned away, so the world cannot be up."""

    world: str
    reason: str


class OrderFailed(Message, frozen=True):
    """Encoder to SMP: the order cannot be finished; ``corrupt`` names a shard with bad bytes.

    ``unfit``: the layouts of the shards do not fit, so that it would fail again.
    """

    snapshot: SnapshotId
    world: str
    reason: str
    corrupt: str = ""
    unfit: bool = False


class Pin(Message, frozen=True):
    """Keep the slots that hold ``snapshot`` from being reused; answered by Ok or Refused.

    ``reader`` is a name of the reader's own making, one for each pin.  The pin lasts until
    Unpin or the death of process ``pid``, and is void from the next incarnation on.
    """

    reader: Name
    snapshot: SnapshotId
    pid: Pid


class LeasedProcess(Message, frozen=True):
    """Register a process that an incarnation of the supervisor has started for a drain.

    It is ended when the lease runs out or another incarnation is admitted.  Answered by Ok, or
    Refused when either has happened.
    """

    who: Name
    pid: Pid
    incarnation: Count


class Unpin(Message, frozen=True):
    """The reader has read what it wanted; answered by Ok, also when there is no such pin."""

    reader: Name


class StacksRequest(Message, frozen=True):
    """Have all trainers of the node write their stacks; those that are suspended are woken for it.

    It is for an incarnation that is about to be ended.
    """

    incarnation: Count


class Stacks(Message, frozen=True):
    """Answer to StacksRequest: shard id to what faulthandler wrote, as far as it came in time."""

    stacks: dict[str, str]
