"""Damaged shards: committed bytes that a scrub or an encoder has found wrong.

A damaged shard counts as lost for its snapshot, so that a recovery rebuilds it from parity, or
takes another snapshot.  Nothing is mended in place: the next snapshot has other bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import Observers


class DamagedShards:
    """Damage by shard and snapshot; ``lost`` are those that count as lost."""

    def __init__(self, observers: Observers) -> None:
        self.lost: set[tuple[str, SnapshotId]] = set()
        self._observers = observers

    def on_event(self, event: m.NodeEvent) -> None:
        """Record what a scrub has found; it reports the same again and again."""
        body = event.body
        if isinstance(body, m.BadBlocks):
            text = f"{body.blocks} blocks that fail their digests"
            self._note(body.shard_id, body.snapshot, text)

    def count_lost(self, snapshot: SnapshotId, shards: Collection[str]) -> None:
        """Encoders have found shards of a local snapshot damaged, which has no parity."""
        for shard in sorted(shards):
            self._note(shard, snapshot, "wrong bytes and no parity")

    def held(self, held: Collection[m.HeldSnapshot]) -> int:
        """Count of the damaged shards of snapshots that nodes still hold."""
        snapshots = {one.snapshot for one in held}
        return sum(snapshot in snapshots for _, snapshot in self.lost)

    def _note(self, shard: str, snapshot: SnapshotId, what: str) -> None:
        if (shard, snapshot) not in self.lost:
            self.lost.add((shard, snapshot))
            text = f"{shard} in snapshot {snapshot} has {what}; it counts as lost"
            self._observers.emit("corrupt", text, shard=shard)
