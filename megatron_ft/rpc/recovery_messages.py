"""How a new life of the job begins on a node: what it holds, what it is to hold."""

from __future__ import annotations

import msgspec

from megatron_ft.arena.format import DIGEST_CRC64
from megatron_ft.core.identity import Ancestor, Count, SealedRecord, ShardId, SnapshotId
from megatron_ft.rpc.encoder_messages import StripeOrder
from megatron_ft.rpc.message_base import Message, Seconds


class Admit(Message, frozen=True):
    """A new incarnation asks to take over: older writers are killed before it is answered."""

    incarnation: Count
    seconds: Seconds


class SlotReport(msgspec.Struct, frozen=True):
    """One slot as its header says it is."""

    slot: int
    state: int
    snapshot: SnapshotId | None
    iteration: int
    local_only: bool
    record: SealedRecord | None
    parity_valid: bool
    stripe_table: tuple[SealedRecord, ...]


class ArenaReport(msgspec.Struct, frozen=True):
    """One arena as its header says it is."""

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
    digest_algorithm: int
    slots: tuple[SlotReport, ...]


class Inventory(Message, frozen=True):
    """Answer to Admit: all that the node holds, after its older writers have died.

    ``damaged`` are arena files of this job that cannot be read; they count as lost and may
    be replaced.  ``foreign`` are those of another job or format, which may not.
    """

    node: str
    highest_incarnation: int
    arenas: tuple[ArenaReport, ...]
    damaged: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


class Adopt(Message, frozen=True):
    """The decision of a recovery: go on from ``restore``, forget all that is off the lineage.

    ``keep`` are the shards that live on the receiving node from now on; arenas of others
    (of a node that was replaced and has come back, say) are removed.
    """

    incarnation: Count
    lineage: tuple[Ancestor, ...]
    restore: SnapshotId | None
    keep: tuple[str, ...] = ()


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
    digest_algorithm: Count = DIGEST_CRC64


class ArenasReady(Message, frozen=True):
    """Every arena of the job exists: waiting Prepare requests may be answered, or refused."""

    incarnation: Count
    error: str = ""
    reason: str = ""


class Rebuild(Message, frozen=True):
    """Start rebuilding the lost members of these stripes."""

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    world: str
    stripes: tuple[StripeOrder, ...]


class Load(Message, frozen=True):
    """Make room for these shards of ``snapshot``, which a loader brings from disk.

    They count as lost until it says Loaded.
    """

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    shards: tuple[str, ...]


class RestoreReady(Message, frozen=True):
    """Trainers of the incarnation may start: ``sources`` says where each shard came from."""

    incarnation: Count
    snapshot: SnapshotId | None
    sources: dict[str, str]


class Retire(Message, frozen=True):
    """The job has ended: remove arenas if asked, and exit."""

    incarnation: Count
    remove_arenas: bool
