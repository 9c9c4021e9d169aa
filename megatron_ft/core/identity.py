"""Values that messages and files share: ids, sealed records, lineage, numbers of ranks.  Pure.

A lineage is the chain of snapshots that the current incarnation of a job descends from.  A
RankRule says with how many ranks a command can continue; its ranks give it when they register,
as only the framework's integration knows it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number that fits every field which it is stored in; msgspec refuses others when decoding."""

Iteration = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 62) - 1)]
"""An iteration as a message or file may name it; -1 is none."""

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A digest of 32 bytes."""

ShardId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z")]
"""A shard's name as a message or file may have it: it names files, too."""


class SnapshotId(NamedTuple):
    """Identity of one snapshot within a job.

    The iteration is not part of it: after a rollback the same iteration is
    captured twice, by two incarnations, with different bytes.  Ids compare by
    incarnation first, so a later incarnation of the job always compares as newer.
    """

    incarnation: Count
    sequence: Count

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.sequence}"


class Ancestor(NamedTuple):
    """One step of a lineage: the snapshot from which an incarnation started.

    ``parent`` is None for an incarnation that started from scratch or from disk.
    """

    incarnation: Count
    parent: SnapshotId | None


class SealedRecord(msgspec.Struct, frozen=True, array_like=True):
    """Proof and description of one sealed shard; every stripe member stores all of them.

    Lengths are bytes, offsets are relative to the start of the slot's data region.
    ``digest_root`` covers the digest table and, through it, every byte up to
    ``digest_offset``; see docs/reference/arena-format.md.
    """

    shard_id: ShardId
    snapshot: SnapshotId
    iteration: Count
    tensor_bytes: Count
    meta_offset: Count
    meta_bytes: Count
    digest_offset: Count
    used_bytes: Count
    layout_hash: Hash
    digest_root: Hash


class ShardPlacement(msgspec.Struct, frozen=True, array_like=True):
    """Place of a shard in the job, independent of nodes; stripes are planned from these.

    ``coordinates`` are the model-parallel ones without the data-parallel one;
    ``required_bytes`` is what its trainer asked of a slot.
    """

    rank: int
    coordinates: tuple[int, ...]
    required_bytes: int


def shard_id(*, pp: int = 0, tp: int = 0, dp: int = 0, ep: int = 0) -> str:
    """The logical place of a shard, for example ``pp0-tp1-dp3-ep0``.

    Host names and global ranks are left out on purpose: any trainer may take any
    shard on any node.
    """
    return f"pp{pp}-tp{tp}-dp{dp}-ep{ep}"


class ShardPlace(NamedTuple):
    """Parts of a :func:`shard_id`."""

    pp: int
    tp: int
    dp: int
    ep: int


_SHARD_ID = re.compile(r"pp(\d+)-tp(\d+)-dp(\d+)-ep(\d+)")


def place_of_shard(shard: str) -> ShardPlace | None:
    """The inverse of :func:`shard_id`; None for a name of another form."""
    found = _SHARD_ID.fullmatch(shard)
    return ShardPlace(*map(int, found.groups())) if found else None


def on_lineage(snapshot: SnapshotId, lineage: Sequence[Ancestor]) -> bool:
    """True if the newest incarnation of ``lineage`` descends from ``snapshot``.

    An incarnation's own snapshots all are.  Those of an older incarnation are only up to
    the snapshot from which its successor started: what it captured after that was
    rolled back, and may hold an iteration that exists a second time with other bytes.
    """
    limit: SnapshotId | None = None
    for ancestor in reversed(lineage):
        if snapshot.incarnation == ancestor.incarnation:
            return limit is None or snapshot <= limit
        limit = ancestor.parent
        if limit is None:
            return False
    return False


def extend(
    lineage: Sequence[Ancestor], incarnation: int, parent: SnapshotId | None, *, keep: int = 64
) -> tuple[Ancestor, ...]:
    """The lineage of a new incarnation that starts from ``parent`` (None: from scratch or disk).

    Ancestors that ``parent`` does not descend from drop out, and only the newest ``keep``
    stay; a snapshot older than all of them counts as off the lineage.
    """
    if parent is None:
        return (Ancestor(incarnation, None),)
    older = [a for a in lineage if a.incarnation <= parent.incarnation]
    return (*older, Ancestor(incarnation, parent))[-keep:]


Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]

STOP, HOLD, SHRINK, CHEAPEST = "stop", "hold", "shrink", "auto"
"""Values of ``on_no_spare``; CHEAPEST takes one of the others, by its expected cost."""

MAY_SHRINK = (SHRINK, CHEAPEST)
"""Those with which a job may continue with fewer nodes."""


class RankRule(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of ranks that a command works with.

    They are multiples of ``multiple``; ``replica`` ranks hold one copy of the model, and an
    iteration has ``micro_batches``, which the copies must be able to share evenly.
    ``replica`` should divide ``multiple``.
    """

    multiple: Positive
    replica: Positive
    micro_batches: Count

    def against(self, ranks: int) -> str:
        """The reason why the command does not work with this many ranks; empty if it does."""
        if ranks < 1 or ranks % self.multiple or ranks < self.replica:
            return f"{ranks} ranks are not a multiple of {self.multiple}, the model-parallel size"
        copies = ranks // self.replica
        if self.micro_batches % copies:
            return (
                f"the {self.micro_batches} micro-batches of an iteration cannot be shared by "
                f"{copies} data-parallel ranks"
            )
        return ""
