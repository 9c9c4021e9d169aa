"""What one SMP decides, without any input or output: messages in, effects out.

The daemon (daemon.py) feeds it messages and carries out the effects in order; the
model test feeds it random interleavings.  Arena headers are its only durable state,
so a restarted SMP rebuilds it from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_ft.arena.format import Permit, SlotHeader, SlotState
from megatron_ft.errors import StaleIncarnationError
from megatron_ft.identity import Ancestor, SnapshotId
from megatron_ft.recovery.lineage import on_lineage
from megatron_ft.smp import messages as m
from megatron_ft.smp.slots import PinnedError, ShardSlots, TransitionRefusedError, WorldGoneError


@dataclass(frozen=True)
class StoreSlot:
    """Write one slot header into its arena."""

    shard_id: str
    slot: int
    header: SlotHeader


@dataclass(frozen=True)
class StorePermit:
    """Write the permit word that the shard's trainer reads."""

    shard_id: str
    permit: Permit | None


@dataclass(frozen=True)
class ToTrainer:
    """Send a message to the shard's trainer."""

    shard_id: str
    body: m.Message


@dataclass(frozen=True)
class ToEncoder:
    """Send an order to the node's encoder."""

    body: m.Message


@dataclass(frozen=True)
class ToCoordinator:
    """Send an event to the coordinator."""

    body: Any


@dataclass(frozen=True)
class MendSlot:
    """Prove recomputed blocks of a committed slot, write them, and tell the coordinator.

    ``header`` is the slot's header when this was decided; effects are carried out in order,
    so the slot is given to nobody before.
    """

    shard_id: str
    slot: int
    header: SlotHeader
    blocks: m.Recomputed


Effect = MendSlot | StoreSlot | StorePermit | ToTrainer | ToEncoder | ToCoordinator


class NodeMachine:
    """State of one SMP and its reaction to each message.

    ``trainers`` are shards whose registered trainer is alive, ``world`` the MPI world of
    the node's live encoder ("" if none).  ``paths`` gives each shard's arena path.
    """

    def __init__(self, node: str, highest_incarnation: int = 0) -> None:
        self.node = node
        self.highest_incarnation = highest_incarnation
        self.shards: dict[str, ShardSlots] = {}
        self.paths: dict[str, str] = {}
        self.trainers: set[str] = set()
        self.world = ""
        self.effects: list[Effect] = []
        self._said: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """Effects since the last call, in the order in which they must happen."""
        taken, self.effects = self.effects, []
        return taken

    def handle(self, message: m.Message) -> m.Message:
        """React to one request; what cannot be done is answered by Refused, never raised."""
        handler: Callable[[Any], m.Message] = self._HANDLERS[type(message)].__get__(self)
        try:
            self._check_incarnation(message)
            return handler(message)
        except (TransitionRefusedError, StaleIncarnationError) as error:
            return m.Refused(type(error).__name__, f"node {self.node}: {error}")
        finally:
            self._collect_changes()

    def _check_incarnation(self, message: m.Message) -> None:
        incarnation = getattr(message, "incarnation", self.highest_incarnation)
        if incarnation != self.highest_incarnation:
            raise StaleIncarnationError(
                f"{type(message).__name__} of incarnation {incarnation} after "
                f"{self.highest_incarnation} was admitted"
            )

    def _collect_changes(self) -> None:
        """Slot changes first, then whatever tells others about them.

        Both go behind the effects of earlier messages that are still to be carried out:
        an older header must never be stored over a newer one.
        """
        for shard_id, slots in self.shards.items():
            for slot, header in slots.take_changes():
                self.effects.append(StoreSlot(shard_id, slot, header))
        self.effects += self._said
        self._said = []

    # Trainers.

    def trainer_joined(self, shard_id: str) -> None:
        """A trainer has registered for ``shard_id`` and is watched."""
        self.trainers.add(shard_id)

    def trainer_gone(self, shard_id: str, pid: int) -> None:
        """The trainer is dead: whatever it was capturing will never be finished."""
        self.trainers.discard(shard_id)
        if shard_id in self.shards:
            self.shards[shard_id].capture_ended()
        self._tell(m.WriterGone("trainer", shard_id, pid))
        self._collect_changes()

    def _sealed(self, message: m.Sealed) -> m.Message:
        record = message.record
        if self._slots(record.shard_id).seal(record):
            self._tell(message)
        else:
            self._tell(m.SlotFreed(record.shard_id, record.snapshot))
        return m.Ok()

    def _gave_up(self, message: m.Missed | m.Abandoned) -> m.Message:
        if self._slots(message.shard_id).capture_ended(message.snapshot):
            self._tell(message)
        return m.Ok()

    # Encoders.

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
                self._tell(m.SlotFreed(slots.shard_id, snapshot))
        self._tell(m.WriterGone("encoder", world, pid))
        self._collect_changes()

    def adopted(self) -> None:
        """All living writers are known again: what the others were in the middle of is void.

        An SMP may die between forgetting a dead writer and storing what that means.
        """
        for shard_id, slots in self.shards.items():
            if shard_id not in self.trainers:
                slots.capture_ended()
            if not self.world:
                slots.encoder_gone()
        self._collect_changes()

    def _encoded(self, message: m.Encoded) -> m.Message:
        self._check_world(message.world)
        slots = self._slots(message.shard_id)
        slots.protect(message.snapshot, message.parity_root, message.stripe_table)
        self._tell(message)
        self._said.append(ToTrainer(message.shard_id, m.Outcome(message.snapshot, "protected")))
        return m.Ok()

    def _rebuilt(self, message: m.Rebuilt) -> m.Message:
        self._check_world(message.world)
        slots = self._slots(message.shard_id)
        slots.rebuilt(message.record, message.parity_root, message.stripe_table)
        self._tell(message)
        return m.Ok()

    def _loaded(self, message: m.Loaded) -> m.Message:
        self._check_world(message.world)
        self._slots(message.record.shard_id).loaded(message.record)
        return m.Ok()

    def _recomputed(self, message: m.Recomputed) -> m.Message:
        self._check_world(message.world)
        slots = self._slots(message.shard_id)
        index = slots.repairable(message.snapshot)
        self._said.append(MendSlot(message.shard_id, index, slots.slots[index], message))
        return m.Ok()

    def _order_ended(self, message: m.OrderDone | m.OrderFailed) -> m.Message:
        self._tell(message)
        return m.Ok()

    def _check_world(self, world: str) -> None:
        """An encoder of a world that has been replaced must not move any state."""
        if world != self.world:
            raise WorldGoneError(f"encoder world {world} is gone; now {self.world or '-'}")

    # Readers.

    def _pin(self, message: m.Pin | m.Hold) -> m.Message:
        for slots in self.shards.values():
            slots.check_pinnable(message.snapshot)
        for slots in self.shards.values():
            slots.pin(message.reader, message.snapshot)
        return m.Ok()

    def _unpin(self, message: m.Unpin | m.Unhold) -> m.Message:
        self.reader_gone(message.reader)
        return m.Ok()

    def reader_gone(self, reader: str) -> None:
        """The reader is dead or done: what it held may be reused."""
        for slots in self.shards.values():
            slots.unpin(reader)

    def readers(self) -> list[str]:
        """Names of the readers that hold some snapshot here."""
        return sorted({reader for slots in self.shards.values() for reader in slots.pins})

    def held_back(self) -> bool:
        """Whether readers are all that is in the way of a Grant."""
        free = all(slots.may_grant() or slots.held_back() for slots in self.shards.values())
        return free and any(slots.held_back() for slots in self.shards.values())

    # The coordinator.

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
        self._drop_permits()
        self._collect_changes()
        return None

    def _adopt(self, message: m.Adopt) -> m.Message:
        for slots in self.shards.values():
            slots.forget(lambda snapshot: self.rolled_back(snapshot, message.lineage))
        return m.Ok()

    def rolled_back(self, snapshot: SnapshotId, lineage: tuple[Ancestor, ...]) -> bool:
        """Whether a snapshot is off the lineage and must never be used again."""
        return not on_lineage(snapshot, lineage)

    def _grant(self, message: m.Grant) -> m.Message:
        if self.held_back():
            raise PinnedError(f"snapshots are being read: {', '.join(self.readers())}")
        for slots in self.shards.values():
            if not slots.may_grant():
                raise TransitionRefusedError(f"{slots.shard_id} has no free slot")
        for shard_id, slots in self.shards.items():
            index = slots.grant(message.snapshot, message.iteration)
            permit = Permit(message.snapshot, message.iteration, index, False)
            self._said.append(StorePermit(shard_id, permit))
        return m.Ok()

    def _encode(self, message: m.Encode) -> m.Message:
        self._check_world(message.world)
        local = self._local_members(message.stripes)
        for shard_id in local:
            self._slots(shard_id).begin_encode(message.snapshot)
        stripes = self._fill_in(message.stripes, message.snapshot)
        if stripes:
            self._said.append(ToEncoder(m.EncodeOrder(message.snapshot, message.world, stripes)))
        return m.Ok()

    def _rebuild(self, message: m.Rebuild) -> m.Message:
        self._check_world(message.world)
        for stripe in message.stripes:
            for shard_id in stripe.lost:
                if shard_id in self.shards:
                    self.shards[shard_id].begin_rebuild(message.snapshot, message.iteration)
        stripes = self._fill_in(message.stripes, message.snapshot)
        if stripes:
            order = m.RebuildOrder(message.snapshot, message.world, stripes)
            self._said.append(ToEncoder(order))
        return m.Ok()

    def _load(self, message: m.Load) -> m.Message:
        for shard_id in message.shards:
            self._slots(shard_id).begin_rebuild(message.snapshot, message.iteration)
        return m.Ok()

    def _repair(self, message: m.Repair) -> m.Message:
        self._check_world(message.world)
        for shard_id in self._local_members(message.stripes):
            self._slots(shard_id).repairable(message.snapshot)
        stripes = self._fill_in(message.stripes, message.snapshot)
        if stripes:
            order = m.RepairOrder(
                message.snapshot,
                message.world,
                stripes,
                message.shard_id,
                message.data_blocks,
                message.parity_blocks,
            )
            self._said.append(ToEncoder(order))
        return m.Ok()

    def _local_members(self, stripes: tuple[m.StripeOrder, ...]) -> list[str]:
        return [s for stripe in stripes for s in stripe.members if s in self.shards]

    def _fill_in(
        self, stripes: tuple[m.StripeOrder, ...], snapshot: SnapshotId
    ) -> tuple[m.StripeOrder, ...]:
        """The order as this node's encoder needs it: with local arenas and slots."""
        filled = []
        for stripe in stripes:
            local = self._local_members((stripe,))
            if not local:
                continue
            slots = {s: self._holding(s, snapshot) for s in local}
            arenas = {s: self.paths[s] for s in local}
            filled.append(msgspec.structs.replace(stripe, arenas=arenas, slots=slots))
        return tuple(filled)

    def _holding(self, shard_id: str, snapshot: SnapshotId) -> int:
        slot = self.shards[shard_id].find(snapshot)
        if slot is None:
            raise TransitionRefusedError(f"{shard_id} has no slot with snapshot {snapshot}")
        return slot

    def _commit(self, message: m.Commit) -> m.Message:
        local_only = message.level == "local"
        for slots in self.shards.values():
            slots.commit(message.snapshot, local_only=local_only)
        for shard_id in self.trainers & self.shards.keys():
            outcome = m.Outcome(message.snapshot, "committed")
            self._said.append(ToTrainer(shard_id, outcome))
        return m.Ok()

    def _abort(self, message: m.Abort) -> m.Message:
        for shard_id, slots in self.shards.items():
            self._revoke(shard_id, message.snapshot)
            freed = slots.abort(
                message.snapshot,
                trainer_alive=shard_id in self.trainers,
                encoder_alive=bool(self.world),
            )
            if not freed:
                self._said.append(ToTrainer(shard_id, m.Outcome(message.snapshot, "aborted")))
        return m.Ok()

    def _revoke(self, shard_id: str, snapshot: SnapshotId) -> None:
        """Have the trainer see that its permit is void; made from the header alone."""
        slots = self.shards[shard_id]
        index = slots.find(snapshot)
        if index is not None and slots.slots[index].state == SlotState.CAPTURING:
            revoked = Permit(snapshot, slots.slots[index].iteration, index, True)
            self._said.append(StorePermit(shard_id, revoked))

    def _drop_permits(self) -> None:
        self._said += [StorePermit(shard_id, None) for shard_id in self.shards]

    def _slots(self, shard_id: str) -> ShardSlots:
        if shard_id not in self.shards:
            raise TransitionRefusedError(f"shard {shard_id} is not on this node")
        return self.shards[shard_id]

    def _tell(self, body: Any) -> None:
        self._said.append(ToCoordinator(body))

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

    _HANDLERS: dict[type[m.Message], Any] = {
        m.Sealed: _sealed,
        m.Missed: _gave_up,
        m.Abandoned: _gave_up,
        m.Encoded: _encoded,
        m.Rebuilt: _rebuilt,
        m.Loaded: _loaded,
        m.Recomputed: _recomputed,
        m.OrderDone: _order_ended,
        m.OrderFailed: _order_ended,
        m.Adopt: _adopt,
        m.Grant: _grant,
        m.Encode: _encode,
        m.Rebuild: _rebuild,
        m.Load: _load,
        m.Repair: _repair,
        m.Commit: _commit,
        m.Abort: _abort,
        m.Pin: _pin,
        m.Unpin: _unpin,
        m.Hold: _pin,
        m.Unhold: _unpin,
    }


def usable(slot: m.SlotReport) -> bool:
    """Whether a reported slot holds complete, digested data."""
    return slot.record is not None and SlotState(slot.state) in (
        SlotState.SEALED,
        SlotState.PROTECTED,
        SlotState.COMMITTED,
    )
