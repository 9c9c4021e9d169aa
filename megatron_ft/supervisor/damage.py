"""Damaged shards: committed bytes that a scrub or an encoder has found wrong.

A damaged shard counts as lost for its snapshot, so that a recovery rebuilds it from parity, or
takes another snapshot.  Nothing is mended in place: each capture writes every byte of its shard
that anybody reads, so the next snapshot is whole unless something changes bytes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import Observers

SUSPECT_AFTER = 2
"""Snapshots in a row for which one arena is reported."""


class DamagedShards:
    """Damage by shard and snapshot; ``lost`` are those that count as lost."""

    def __init__(self, observers: Observers) -> None:
        self.lost: set[tuple[str, SnapshotId]] = set()
        self._observers = observers
        self._refused = Counter[str]()

    def lose(self, shard: str, snapshot: SnapshotId) -> None:
        """Have a shard count as lost in a snapshot, as a load or a rebuild found it damaged."""
        self.lost.add((shard, snapshot))

    def mend(self, shard: str, snapshot: SnapshotId) -> None:
        """Have it count no more: it was rebuilt."""
        self.lost.discard((shard, snapshot))

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

    def count_refused(self, shards: Collection[str], places: Mapping[str, str]) -> None:
        """Encoders have refused the bytes of these shards in one more snapshot."""
        self._refused.update(shards)
        for shard in sorted(shards):
            if self._refused[shard] == SUSPECT_AFTER:
                node = places.get(shard, "a node")
                text = (
                    f"the arena of {shard} on {node}: encoders have found wrong bytes in "
                    f"{SUSPECT_AFTER} snapshots in a row, though each capture writes them anew. "
                    f"Memory or network of {node} changes bytes, or a stray write of the trainer "
                    f"does; `megatron-ft evacuate {node}` moves its ranks to a spare"
                )
                self._observers.emit("suspect", text, shard=shard, node=node)

    def all_accepted(self) -> None:
        """Encoders have accepted the bytes of all shards."""
        self._refused.clear()

    def held(self, held: Collection[m.HeldSnapshot]) -> int:
        """Count of the damaged shards of snapshots that nodes still hold."""
        snapshots = {one.snapshot for one in held}
        return sum(snapshot in snapshots for _, snapshot in self.lost)

    def _note(self, shard: str, snapshot: SnapshotId, what: str) -> None:
        if (shard, snapshot) not in self.lost:
            self.lost.add((shard, snapshot))
            text = f"{shard} in snapshot {snapshot} has {what}; it counts as lost"
            self._observers.emit("corrupt", text, shard=shard)
