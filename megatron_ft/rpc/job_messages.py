"""Messages between the coordinator and the SMPs of a job, and from the command line to an SMP.

The coordinator's orders for one snapshot come first, from permit to commit.  Then how an
incarnation begins on a node, what the command line asks, the heartbeats, and the SMP's events.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from megatron_ft.arena.format import SlotHeader
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.identity import Ancestor, Count, Iteration, ShardId, SnapshotId
from megatron_ft.rpc import node_messages as node
from megatron_ft.rpc.arena_messages import Attached, Outgrown, Unattached
from megatron_ft.rpc.heartbeat_page import PulseReport
from megatron_ft.rpc.node_messages import Message, Name, Seconds, StripeOrder


class Grant(Message, frozen=True):
    """Permit ``snapshot`` at ``iteration`` to every trainer of the node.

    With ``give_up_protected`` the last protected one makes room if nothing else can.  Trainers
    stay at this boundary for up to ``stay`` seconds, as the Permit says.  ``beyond_repair`` is a
    committed snapshot that nothing can be restored from: it goes first.
    """

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    give_up_protected: bool = False
    stay: Seconds = 0.0
    beyond_repair: SnapshotId | None = None


class Encode(Message, frozen=True):
    """Start encoding the node's part of these stripes."""

    incarnation: Count
    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]


class Commit(Message, frozen=True):
    """``snapshot`` is the newest good one everywhere; ``level`` is "protected" or "local"."""

    incarnation: Count
    snapshot: SnapshotId
    level: str


class Abort(Message, frozen=True):
    """``snapshot`` will not be committed; its slots become free once their writers have stopped."""

    incarnation: Count
    snapshot: SnapshotId
    reason: str


class Hold(Message, frozen=True):
    """Pin ``snapshot`` for the coordinator itself, until Unhold or the next incarnation."""

    incarnation: Count
    reader: str
    snapshot: SnapshotId


class Unhold(Message, frozen=True):
    """End a Hold; answered by Ok, also when there is none."""

    incarnation: Count
    reader: str


class Admit(Message, frozen=True):
    """A new incarnation asks to take over: older writers are gone before it is answered.

    Restartable trainers of ``survivors``, which are ranks, may let go of their arenas; all others
    are killed.
    """

    incarnation: Count
    seconds: Seconds
    survivors: tuple[Count, ...] = ()


class ArenaReport(msgspec.Struct, frozen=True):
    """One arena, from its header."""

    shard_id: str
    incarnation: int
    lineage: tuple[Ancestor, ...]
    codec: str
    data_members: int
    parity_members: int
    member_index: int
    members: tuple[str, ...]
    data_bytes: int
    file_bytes: int
    block_bytes: int
    slots: tuple[SlotHeader, ...]


class Inventory(Message, frozen=True):
    """Answer to Admit: all that the node holds, after its older writers have gone.

    ``sources`` are arenas of another layout (MakeSources).
    ``kept`` are the ranks whose process was released as a writer and waits for Reenter;
    ``renewed`` are those that could not be kept, with the reason.
    ``hanging`` are drains that were killed and that the kernel holds; they write to no arena.
    ``damaged`` are arena files of this job that cannot be read; they count as lost and may
    be replaced.  ``foreign`` are those of another job or format, which may not.
    """

    node: str
    highest_incarnation: int
    arenas: tuple[ArenaReport, ...]
    damaged: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    renewed: dict[int, str] = {}
    sources: tuple[ArenaReport, ...] = ()
    hanging: tuple[str, ...] = ()


class LeaseHeld(Message, frozen=True):
    """Answer to Admit: an older coordinator may lead the node for so many ``seconds`` more."""

    seconds: Seconds


class ReenterRanks(Message, frozen=True):
    """Have released trainers train again: rank to the variables that have changed."""

    incarnation: Count
    environments: dict[int, dict[str, str]]


Sources = Literal["drop", "hold", "return"]
"""The fate of arenas that are sources: they are removed, stay, or are the job's own again."""


class Adopt(Message, frozen=True):
    """The decision of a recovery: resume from ``restore``, forget all that is off the lineage.

    ``keep`` are the shards that live on the receiving node from now on; arenas of others
    (of a node that was replaced and has come back, say) are removed.  ``sources`` says what becomes
    of arenas of another layout.
    """

    incarnation: Count
    lineage: tuple[Ancestor, ...]
    restore: SnapshotId | None
    keep: tuple[str, ...] = ()
    sources: Sources = "drop"


class MakeSources(Message, frozen=True):
    """Make all arenas of the node sources of a reshape: arenas of the new layout come beside them.

    They keep ``snapshot`` alone, and nothing is written to them.  They go when a snapshot of the
    new layout is protected.
    """

    incarnation: Count
    snapshot: SnapshotId


class Reshape(Message, frozen=True):
    """Fill the shards of this node, of a new layout, with those of ``source``, an older snapshot.

    ``ranks`` maps the shards of ``source`` to ranks of the encoder world.
    """

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    world: str
    source: SnapshotId
    ranks: dict[str, Count]


class CreateArena(Message, frozen=True):
    """Make the arena of one shard, or check that the one that is there is the same."""

    incarnation: Count
    shard_id: ShardId
    lineage: tuple[Ancestor, ...]
    codec: str
    data_members: Count
    parity_members: Count
    member_index: Count
    members: tuple[str, ...]
    data_bytes: Count
    block_bytes: Count
    slot_count: Count


class ArenasReady(Message, frozen=True):
    """Every arena of the job exists: waiting Prepare requests may be answered, or refused."""

    incarnation: Count
    error: MegatronFTError | None = None


class Rebuild(Message, frozen=True):
    """Start rebuilding the lost members of these stripes."""

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    world: str
    stripes: tuple[StripeOrder, ...]


class Load(Message, frozen=True):
    """Make room for these shards of ``snapshot``, which a loader brings from disk.

    They count as lost until it sends Loaded.
    """

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    shards: tuple[str, ...]


class RestoreReady(Message, frozen=True):
    """Trainers of the incarnation may start: ``origins`` says where each shard came from.

    ``reshaped`` says that the snapshot, of ``iteration``, is of another layout.
    """

    incarnation: Count
    snapshot: SnapshotId | None
    origins: dict[str, str]
    reshaped: bool = False
    iteration: Iteration = -1


class ImportsRequest(Message, frozen=True):
    """Ask for the modules that the first trainer of the node has imported; answered by Imports."""

    incarnation: Count


class Imports(Message, frozen=True):
    """Names of modules, for the trainer host of the node that gets them as a request."""

    incarnation: Count
    modules: tuple[str, ...]


class Retire(Message, frozen=True):
    """The job has ended: remove arenas if asked, and exit.

    Not before ``seconds`` have passed, and not at all if a supervisor comes meanwhile.
    """

    incarnation: Count
    remove_arenas: bool
    seconds: Seconds = 0.0


class Pause(Message, frozen=True):
    """Stop (or start again) permits for new snapshots, in the whole job."""

    paused: bool


class Rewind(Message, frozen=True):
    """Have the job resume from before this iteration; passed on with the next heartbeat."""

    before: Iteration


ON_REQUEST = "on request"

IF_UNHEALTHY = "if it is unhealthy"
"""The reason of a request that counts only if the health command fails on the node now."""


class Evacuate(Message, frozen=True):
    """Have the ranks of ``node`` move to a spare; passed on with each heartbeat.

    With ``undo`` a node that was evacuated is a spare again.  ``number`` tells requests apart;
    ``reason`` is for people.
    """

    node: Name
    number: Name
    reason: Name = ON_REQUEST
    undo: bool = False


class Discard(Message, frozen=True):
    """Free the arenas and exit: for a job that has no supervisor any more."""


class StatusRequest(Message, frozen=True):
    """Ask for the node's own view."""


class ScrubCounts(msgspec.Struct, frozen=True):
    """Counts of a node's scrub since its SMP started; a pass reads everything committed."""

    passes: int = 0
    bytes_read: int = 0
    bad_blocks: int = 0


class Status(Message, frozen=True):
    """Answer to StatusRequest; the supervisor keeps its view of the job in ``status_file``."""

    node: str
    pid: int
    incarnation: int
    paused: bool
    lease_seconds_left: float
    resident_bytes: int
    arenas: tuple[ArenaReport, ...]
    progress: dict[str, int]
    status_file: str = ""
    scrub: ScrubCounts = ScrubCounts()


class Lease(Message, frozen=True):
    """Heartbeat of the coordinator: valid ``seconds`` from ``clock``, then trainers are killed.

    ``clock`` is that of the newest LeaseAnswer that has reached the coordinator, 0 for none,
    which grants nothing.  So a lease that lay in a queue, or that comes through while no
    answer does, is not longer than the coordinator knows.  ``scrub_percent`` is the share of one
    core that the node's scrub may use, 0 for none.  Events of the node's ``stream`` up to
    the number ``acked_event`` have arrived.
    """

    incarnation: Count
    seconds: Seconds
    clock: float = 0.0
    scrub_percent: float = 0.0
    stream: Count = 0
    acked_event: Count = 0


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
    ``rewind`` is the user's request on which the present coordinator has not acted yet.
    ``heartbeats`` are those of trainers, by shard.  ``evacuations`` are the requests that came to
    this SMP since the present coordinator began.
    ``unmade`` says that a Grant would be refused now, until a further slot has memory; ``shortage``
    is why none could be had the last time, "" if there was enough.
    ``missing`` says which arena has no file any more, "" if none: the node then holds nothing.
    ``hanging`` is as in Inventory.  ``readers`` are the names of those that hold snapshots.
    """

    node: str
    paused: bool
    progress: dict[str, int]
    encoder_world: str
    clock: float
    pinned: bool = False
    rewind: int | None = None
    heartbeats: dict[str, PulseReport] = {}
    crowded: bool = False
    held: tuple[HeldSnapshot, ...] = ()
    evacuations: tuple[Evacuate, ...] = ()
    unmade: bool = False
    shortage: str = ""
    missing: str = ""
    hanging: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()


class BadBlocks(Message, frozen=True):
    """The scrub found so many blocks of a committed snapshot that fail their digests."""

    shard_id: ShardId
    snapshot: SnapshotId
    blocks: Count


class WriterGone(Message, frozen=True):
    """A registered trainer or encoder has died; ``who`` is its shard id or world."""

    role: str
    who: str
    pid: int


class SlotFreed(Message, frozen=True):
    """An aborted slot is free: its writer has stopped."""

    shard_id: str
    snapshot: SnapshotId


class ReaderStalled(Message, frozen=True):
    """A reader, or a process of a drain, has not run for long: its pin is dropped."""

    reader: str
    seconds: float


EventBody = (
    node.Hello
    | node.Restartable
    | node.Prepare
    | Outgrown
    | Attached
    | Unattached
    | node.Sealed
    | node.Missed
    | node.Abandoned
    | node.Restored
    | node.Declined
    | node.Ending
    | node.CorruptShard
    | node.Unfit
    | node.CaptureCost
    | node.Slowed
    | node.EncoderHello
    | node.EncoderRefused
    | node.EncoderWaits
    | node.Encoded
    | node.Rebuilt
    | node.Reshaped
    | node.OrderDone
    | node.OrderFailed
    | WriterGone
    | ReaderStalled
    | SlotFreed
    | BadBlocks
)
"""Events that an SMP sends to the coordinator."""


class NodeReport(Message, frozen=True):
    """Several events of one node, in this order."""

    bodies: tuple[EventBody, ...]


class NodeEvent(Message, frozen=True):
    """Something happened on ``node``; ``body`` is an event or several.

    ``first`` is its number, or that of the first thing of a report, in the SMP's ``stream`` of
    events (rpc/event_stream.py).
    """

    node: str
    incarnation: int
    body: EventBody | NodeReport
    stream: Count = 0
    first: Count = 1
