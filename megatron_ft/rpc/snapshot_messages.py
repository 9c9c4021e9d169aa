"""The coordinator's words to all nodes on one snapshot, from permit to commit and after."""

from __future__ import annotations

from megatron_ft.core.identity import Count, SnapshotId
from megatron_ft.rpc.encoder_messages import StripeOrder
from megatron_ft.rpc.message_base import Message


class Grant(Message, frozen=True):
    """Permit ``snapshot`` at ``iteration`` to every trainer of the node.

    With ``give_up_protected`` the last protected one makes room if nothing else can.
    """

    incarnation: Count
    snapshot: SnapshotId
    iteration: Count
    give_up_protected: bool = False


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


class Repair(Message, frozen=True):
    """Have blocks of ``shard_id`` recomputed from its stripe, while its slot stays committed."""

    incarnation: Count
    snapshot: SnapshotId
    world: str
    stripes: tuple[StripeOrder, ...]
    shard_id: str
    data_blocks: tuple[int, ...]
    parity_blocks: tuple[int, ...]


class Hold(Message, frozen=True):
    """Pin ``snapshot`` for the coordinator itself, until Unhold or the next incarnation."""

    incarnation: Count
    reader: str
    snapshot: SnapshotId


class Unhold(Message, frozen=True):
    """End a Hold; answered by Ok, also when there is none."""

    incarnation: Count
    reader: str
