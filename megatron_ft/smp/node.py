"""What one SMP decides, without any input or output: messages in, effects out.

The daemon (daemon.py) feeds it messages and carries out the effects in order; the
model test feeds it random interleavings.  Arena headers are its only durable state,
so a restarted SMP rebuilds it from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ft.core.errors import StaleIncarnationError
from megatron_ft.core.identity import Ancestor, SnapshotId, on_lineage
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.node_messages import TransitionRefusedError
from megatron_ft.smp.node_shards import NodeShards, StorePermit
from megatron_ft.smp.reactions import encoders, orders, readers, trainers
from megatron_ft.smp.slot_rules import is_committed
from megatron_ft.smp.slots import forget

_REACTIONS: dict[type[m.Message], Callable[[NodeShards, Any], m.Message]] = {
    **trainers.REACTIONS,
    **encoders.REACTIONS,
    **readers.REACTIONS,
    **orders.REACTIONS,
}


class NodeMachine(NodeShards):
    """State of one SMP, its reaction to each request, and who comes and goes."""

    def handle(self, message: m.Message) -> m.Message:
        """React to one request; what cannot be done is answered by Refused, never raised."""
        try:
            self.check_incarnation(message)
            if isinstance(message, m.Adopt):
                return self._adopt(message)
            return _REACTIONS[type(message)](self, message)
        except (TransitionRefusedError, StaleIncarnationError) as error:
            return m.Refused(type(error).__name__, f"node {self.node}: {error}")
        finally:
            self._collect_changes()

    def trainer_joined(self, shard_id: str) -> None:
        """A trainer has registered for ``shard_id`` and is watched."""
        self.trainers.add(shard_id)

    def trainer_gone(self, shard_id: str, pid: int) -> None:
        """The trainer is dead: whatever it was capturing will never be finished."""
        self.trainers.discard(shard_id)
        if shard_id in self.shards:
            self.shards[shard_id].capture_ended()
        self.tell(m.WriterGone("trainer", shard_id, pid))
        self._collect_changes()

    def encoder_joined(self, world: str) -> None:
        """The node's encoder belongs to ``world`` from here on; the one before is dead."""
        assert not self.world
        self.world = world

    def encoder_gone(self, world: str, pid: int) -> None:
        """The encoder is dead: parity it was writing is void, its rebuild targets are free."""
        assert world == self.world
        self.world = ""
        for slots in self.shards.values():
            for snapshot in slots.encoder_gone():
                self.tell(m.SlotFreed(slots.shard_id, snapshot))
        self.tell(m.WriterGone("encoder", world, pid))
        self._collect_changes()

    def adopted(self) -> None:
        """All living writers are known again: what the others were in the middle of is void.

        An SMP may die between forgetting a dead writer and storing what that means.
        """
        for shard_id, slots in self.shards.items():
            for header in slots.slots:
                if header.snapshot is not None:
                    self.note_newest(header.snapshot)
            if shard_id not in self.trainers:
                slots.capture_ended()
            if not self.world:
                slots.encoder_gone()
        self._collect_changes()

    def reader_gone(self, reader: str) -> None:
        """The reader is dead or done: what it held may be reused."""
        readers.drop_reader(self, reader)

    def readers(self) -> list[str]:
        """Names of the readers that hold some snapshot here."""
        return readers.readers(self)

    def held_back(self) -> bool:
        """Whether readers are all that is in the way of a Grant."""
        return readers.held_back(self)

    def crowded(self) -> bool:
        """Whether the last protected snapshot is all that is in the way of a Grant."""
        return any(slots.crowded() for slots in self.shards.values())

    def held(self) -> tuple[m.HeldSnapshot, ...]:
        """Committed snapshots that every shard here has, the newest first."""
        tables = [
            {s.snapshot: s for s in slots.slots if is_committed(s)}
            for slots in self.shards.values()
        ]
        if not tables:
            return ()
        common = set(tables[0]).intersection(*tables[1:])
        return tuple(
            m.HeldSnapshot(
                snapshot,
                tables[0][snapshot].iteration,
                all(not table[snapshot].local_only for table in tables),
            )
            for snapshot in sorted((s for s in common if s is not None), reverse=True)
        )

    def admit(self, incarnation: int) -> m.Refused | None:
        """Accept a new incarnation, once every older writer of the node is dead.

        The caller has stored the number and killed the writers before; here their
        unfinished work is dropped, and pins are void: a recovery waits for no reader.  A
        number that is not higher is refused.
        """
        if incarnation <= self.highest_incarnation:
            return m.Refused(
                "StaleIncarnationError",
                f"node {self.node} has already admitted incarnation {self.highest_incarnation}",
            )
        assert not self.trainers and not self.world
        self.highest_incarnation = incarnation
        for slots in self.shards.values():
            slots.pins.clear()
            slots.capture_ended()
            slots.encoder_gone()
        self.say(*(StorePermit(shard_id, None) for shard_id in self.shards))
        self._collect_changes()
        return None

    def rolled_back(self, snapshot: SnapshotId, lineage: tuple[Ancestor, ...]) -> bool:
        """Whether a snapshot is off the lineage and must never be used again."""
        return not on_lineage(snapshot, lineage)

    def _adopt(self, message: m.Adopt) -> m.Message:
        for slots in self.shards.values():
            forget(slots, lambda snapshot: self.rolled_back(snapshot, message.lineage))
        return m.Ok()

    def inventory_slots(self, shard_id: str) -> tuple[m.SlotReport, ...]:
        """The slots of one shard, as reported to the coordinator."""
        return tuple(
            m.SlotReport(
                slot=index,
                state=int(slot.state),
                snapshot=slot.snapshot,
                iteration=slot.iteration,
                local_only=slot.local_only,
                record=slot.record,
                parity_valid=slot.parity_valid,
                stripe_table=slot.stripe_table,
            )
            for index, slot in enumerate(self.shards[shard_id].slots)
        )
