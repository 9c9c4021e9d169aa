"""State machine of one SMP: requests in, effects out, no input or output.

The servers feed it requests, and the service carries its effects out in order.  The protocol model
feeds it random interleavings.  Arena headers are its only durable state, so that a restarted SMP
rebuilds it from them.  The slots of one arena are in slots.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_ft.arena.format import Permit, SlotHeader, SlotState
from megatron_ft.core.errors import (
    PinnedError,
    StaleIncarnationError,
    TransitionRefusedError,
    WorldGoneError,
)
from megatron_ft.core.identity import SnapshotId, on_lineage
from megatron_ft.rpc import messages as m
from megatron_ft.smp.effects import (
    Effect,
    StorePermit,
    StoreSlot,
    ToCoordinator,
    ToEncoder,
    ToTrainer,
)
from megatron_ft.smp.slot_rules import capturing, ending
from megatron_ft.smp.slots import ShardSlots, committed_in_all


@dataclass(frozen=True)
class SourceArena:
    """An arena of an older layout, of which shards of the present one are made; it never changes.

    ``path`` is that of its file, ``slots`` are its headers.  ``same_layout``: it is only too small
    for its shard, which gets a larger arena.
    """

    path: str
    slots: tuple[SlotHeader, ...]
    same_layout: bool = False


class NodeMachine:
    """Shards, writers and waiting effects of one SMP, and its reaction to each request.

    ``trainers`` are shards whose registered trainer is alive, ``world`` the world of
    the node's live encoder ("" if none).  ``paths`` gives each shard's arena path, ``sources`` are
    arenas of an older layout, ``newest`` is the newest snapshot that was permitted or decided here.
    """

    def __init__(self, node: str, highest_incarnation: int = 0) -> None:
        self.node = node
        self.highest_incarnation = highest_incarnation
        self.shards: dict[str, ShardSlots] = {}
        self.paths: dict[str, str] = {}
        self.sources: dict[str, SourceArena] = {}
        self.trainers: set[str] = set()
        self.world = ""
        self.newest: SnapshotId | None = None
        self.effects: list[Effect] = []
        self._after: list[Effect] = []

    def handle(self, message: m.Message) -> m.Message:
        """React to one request: Ok, or Refused for what cannot be done; nothing is raised."""
        try:
            self.check_incarnation(message)
            REACTIONS[type(message)](self, message)
            return m.Ok()
        except (TransitionRefusedError, StaleIncarnationError) as error:
            return m.Refused(type(error)(f"node {self.node}: {error}"))
        finally:
            self._collect_changes()

    def take_effects(self) -> list[Effect]:
        """Effects since the last call, in the order in which they must happen."""
        taken, self.effects = self.effects, []
        return taken

    # Checks of a request.

    def check_incarnation(self, message: m.Message) -> None:
        """Refuse a request of an older incarnation, or of one not admitted here."""
        incarnation = getattr(message, "incarnation", self.highest_incarnation)
        if incarnation != self.highest_incarnation:
            raise StaleIncarnationError(
                f"{type(message).__name__} of incarnation {incarnation} after "
                f"{self.highest_incarnation} was admitted"
            )

    def _check_world(self, world: str) -> None:
        """Refuse an encoder of a world that has been replaced."""
        if world != self.world:
            raise WorldGoneError(f"encoder world {world} is gone; now {self.world or '-'}")

    def _slots_of(self, shard_id: str) -> ShardSlots:
        if shard_id not in self.shards:
            raise TransitionRefusedError(f"shard {shard_id} is not on this node")
        return self.shards[shard_id]

    def too_late(self, snapshot: SnapshotId) -> bool:
        """True if a permit was overtaken: it has been given, or decided upon, before."""
        return self.newest is not None and snapshot <= self.newest

    def _record_newest(self, snapshot: SnapshotId) -> None:
        """Permit no older snapshot from here on, nor this one again."""
        self.newest = snapshot if self.newest is None else max(self.newest, snapshot)

    # What follows from a request.

    def _emit(self, *effects: Effect) -> None:
        """Have these happen once the slot changes of this reaction are stored."""
        self._after += effects

    def _report(self, body: Any) -> None:
        """Send an event to the coordinator, as ``_emit``."""
        self._emit(ToCoordinator(body))

    def _collect_changes(self) -> None:
        """Slot changes first, then the messages about them.

        Both go behind the effects of earlier messages that are still to be carried out:
        an older header must never be stored over a newer one.
        """
        for shard_id, slots in self.shards.items():
            for slot, header in slots.take_changes():
                self.effects.append(StoreSlot(shard_id, slot, header))
        self.effects += self._after
        self._after = []

    # A snapshot, from permit to commit or abort.

    def _grant(self, message: m.Grant) -> None:
        """Give each shard's trainer a slot for a future iteration, or none of them.

        A permit may come twice, or after its snapshot was decided: over a connection made anew.
        """
        snapshot = message.snapshot
        if self.too_late(snapshot):
            self._check_granted(snapshot)
            return
        if self.held_back():
            raise PinnedError(f"snapshots are being read: {', '.join(self.readers())}")
        for slots in self.shards.values():
            if not slots.may_grant(
                give_up_protected=message.give_up_protected, lost=message.beyond_repair
            ):
                raise TransitionRefusedError(f"{slots.shard_id} has no free slot")
        self._record_newest(snapshot)
        for shard_id, slots in self.shards.items():
            index = slots.grant(
                snapshot,
                message.iteration,
                give_up_protected=message.give_up_protected,
                lost=message.beyond_repair,
            )
            permit = Permit(snapshot, message.iteration, index, stay=message.stay)
            self._emit(StorePermit(shard_id, permit))

    def _check_granted(self, snapshot: SnapshotId) -> None:
        """Refuse a repeated permit unless it still stands, which changes nothing."""
        for slots in self.shards.values():
            index = slots.find(snapshot)
            stands = index is not None and not ending(slots.slots[index])
            if snapshot != self.newest or not (stands or slots.promised(snapshot)):
                raise TransitionRefusedError(f"{slots.shard_id} is past snapshot {snapshot}")

    def _begins(self, message: m.Begins) -> None:
        """The trainer wants the slot that it was promised; without one its permit is void."""
        slots = self._slots_of(message.shard_id)
        try:
            slots.begin_capture(message.snapshot)
        except TransitionRefusedError:
            # The one permit word may be that of a newer snapshot, which must stay valid.
            theirs = slots.promise is None or slots.promised(message.snapshot)
            if theirs and not capturing(slots.slots) and message.slot < len(slots.slots):
                void = Permit(message.snapshot, message.iteration, message.slot, True)
                self._emit(StorePermit(message.shard_id, void))
            raise

    def _sealed(self, message: m.Sealed) -> None:
        record = message.record
        if self._slots_of(record.shard_id).seal(record):
            self._report(message)
        else:
            self._report(m.SlotFreed(record.shard_id, record.snapshot))

    def _gave_up(self, message: m.Missed | m.Abandoned) -> None:
        """The trainer does not write to this snapshot's slot, or not any more."""
        if self._slots_of(message.shard_id).capture_ended(message.snapshot):
            self._report(message)

    def _encode(self, message: m.Encode) -> None:
        """Have parity computed; it is invalid from here on until it is complete.

        An order that comes again changes nothing: parity that is complete must not become invalid.
        """
        self._check_world(message.world)
        local = self._local_members(message.stripes)
        if local and all(self._slots_of(s).encoding_begun(message.snapshot) for s in local):
            return
        for shard_id in local:
            self._slots_of(shard_id).begin_encode(message.snapshot)
        self._order(m.EncodeOrder, message)

    def _encoded(self, message: m.Encoded) -> None:
        self._check_world(message.world)
        slots = self._slots_of(message.shard_id)
        slots.protect(message.snapshot, message.parity_root, message.stripe_table)
        self._report(message)
        self._emit(ToTrainer(message.shard_id, m.SnapshotOutcome(message.snapshot, "protected")))

    def _commit(self, message: m.Commit) -> None:
        """The snapshot is complete everywhere: from here on a failure falls back to it."""
        self._record_newest(message.snapshot)
        for slots in self.shards.values():
            slots.commit(message.snapshot, local_only=message.level == "local")
        for shard_id in self.trainers & self.shards.keys():
            self._emit(ToTrainer(shard_id, m.SnapshotOutcome(message.snapshot, "committed")))

    def _abort(self, message: m.Abort) -> None:
        """The snapshot will never be complete; a slot that is still written is freed later."""
        snapshot = message.snapshot
        self._record_newest(snapshot)
        for shard_id, slots in self.shards.items():
            begun = slots.find(snapshot) is not None
            self._revoke(slots, snapshot)
            if slots.promised(snapshot):
                self._report(m.SlotFreed(shard_id, snapshot))
            trainer, encoder = shard_id in self.trainers, bool(self.world)
            slots.abort(snapshot, trainer_alive=trainer, encoder_alive=encoder)
            if begun:
                # Also where the slot is free already: a trainer may wait for the outcome.
                self._emit(ToTrainer(shard_id, m.SnapshotOutcome(snapshot, "aborted")))

    def _revoke(self, slots: ShardSlots, snapshot: SnapshotId) -> None:
        """Make the permit void before the trainer's eyes."""
        index, promise = slots.find(snapshot), slots.promise
        if promise is not None and slots.promised(snapshot):
            iteration, slot = promise.iteration, promise.slot
        elif index is not None and slots.slots[index].state == SlotState.CAPTURING:
            iteration, slot = slots.slots[index].iteration, index
        else:
            return
        self._emit(StorePermit(slots.shard_id, Permit(snapshot, iteration, slot, True)))

    # Orders to the node's encoder.

    def _local_members(self, stripes: tuple[m.StripeOrder, ...]) -> list[str]:
        return [s for stripe in stripes for s in stripe.members if s in self.shards]

    def _order(self, kind: Callable[..., m.Message], message: Any) -> None:
        """Pass an order on as this node's encoder needs it: with local arenas and slots."""
        filled = []
        for stripe in message.stripes:
            local = self._local_members((stripe,))
            if local:
                slots = {s: self.shards[s].slot_of(message.snapshot) for s in local}
                arenas = {s: self.paths[s] for s in local}
                filled.append(msgspec.structs.replace(stripe, arenas=arenas, slots=slots))
        if filled:
            self._emit(ToEncoder(kind(message.snapshot, message.world, tuple(filled))))

    # Recovery.

    def _rebuild(self, message: m.Rebuild) -> None:
        """Have lost members solved; those that come here get a slot."""
        self._check_world(message.world)
        for stripe in message.stripes:
            for shard_id in stripe.lost:
                if shard_id in self.shards:
                    self.shards[shard_id].begin_rebuild(message.snapshot, message.iteration)
        self._order(m.RebuildOrder, message)

    def _rebuilt(self, message: m.Rebuilt) -> None:
        self._check_world(message.world)
        slots = self._slots_of(message.shard_id)
        slots.rebuilt(message.record, message.parity_root, message.stripe_table)
        self._report(message)

    def _load(self, message: m.Load) -> None:
        for shard_id in message.shards:
            self._slots_of(shard_id).begin_rebuild(message.snapshot, message.iteration)

    def _loaded(self, message: m.Loaded | m.Reshaped) -> None:
        """A shard was read from a drained checkpoint, its digests proven."""
        self._check_world(message.world)
        self._slots_of(message.record.shard_id).loaded(message.record)

    def _reshape(self, message: m.Reshape) -> None:
        """Give each shard, all of a new layout, a slot; the encoder fills it from the sources."""
        self._check_world(message.world)
        new = {
            shard_id: m.PlacedShard(
                self.paths[shard_id],
                slots.begin_rebuild(message.snapshot, message.iteration),
                m.layout_path(self.paths[shard_id]),
            )
            for shard_id, slots in self.shards.items()
        }
        held = {
            shard_id: m.PlacedShard(source.path, index)
            for shard_id, source in self.sources.items()
            for index, slot in enumerate(source.slots)
            if slot.snapshot == message.source and slot.record is not None
        }
        order = m.ReshapeOrder(
            snapshot=message.snapshot,
            world=message.world,
            iteration=message.iteration,
            source=message.source,
            ranks=message.ranks,
            held=held,
            new=new,
        )
        self._emit(ToEncoder(order))

    def _reshaped(self, message: m.Reshaped) -> None:
        self._loaded(message)
        self._report(message)

    def admit(self, incarnation: int) -> m.Refused | None:
        """Accept a new incarnation, once every older writer of the node is dead.

        The caller has stored the number and killed the writers before; here their
        unfinished work is dropped, and pins are void: a recovery waits for no reader.  A
        number that is not higher is refused.
        """
        if incarnation <= self.highest_incarnation:
            highest = f"incarnation {self.highest_incarnation}"
            return m.Refused(
                StaleIncarnationError(f"node {self.node} has already admitted {highest}")
            )
        assert not self.trainers and not self.world
        self.highest_incarnation = incarnation
        for slots in self.shards.values():
            slots.pins.clear()
            slots.capture_ended()
            slots.encoder_gone()
        self._emit(*(StorePermit(shard_id, None) for shard_id in self.shards))
        self._collect_changes()
        return None

    def _adopt(self, message: m.Adopt) -> None:
        """Forget every snapshot off the lineage: it was rolled back and is never used again."""
        for slots in self.shards.values():
            slots.forget(lambda snapshot: not on_lineage(snapshot, message.lineage))

    # Writers that come and go.

    def trainer_joined(self, shard_id: str) -> None:
        """A trainer has registered for ``shard_id`` and is watched."""
        self.trainers.add(shard_id)

    def trainer_gone(self, shard_id: str, pid: int) -> None:
        """The trainer is dead: whatever it was capturing will never be finished."""
        self.trainers.discard(shard_id)
        if shard_id in self.shards:
            self.shards[shard_id].capture_ended()
        self._report(m.WriterGone("trainer", shard_id, pid))
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
                self._report(m.SlotFreed(slots.shard_id, snapshot))
        self._report(m.WriterGone("encoder", world, pid))
        self._collect_changes()

    def adopted(self) -> None:
        """All living writers are known again: the unfinished work of the others is void.

        An SMP may die between forgetting a dead writer and storing what that means.
        """
        for shard_id, slots in self.shards.items():
            for header in slots.slots:
                if header.snapshot is not None:
                    self._record_newest(header.snapshot)
            if shard_id not in self.trainers:
                slots.capture_ended()
            if not self.world:
                slots.encoder_gone()
        self._collect_changes()

    # Readers: drains, exports, verification.

    def _pin(self, message: m.Pin | m.Hold) -> None:
        """Keep a snapshot of every shard here until the reader is done, or nothing of it."""
        for slots in self.shards.values():
            slots.check_pinnable(message.snapshot)
        for slots in self.shards.values():
            slots.pin(message.reader, message.snapshot)

    def reader_gone(self, reader: str) -> None:
        """The reader is dead or done: what it held may be reused."""
        for slots in self.shards.values():
            slots.unpin(reader)

    def readers(self) -> list[str]:
        return sorted({reader for slots in self.shards.values() for reader in slots.pins})

    # What the coordinator learns with each heartbeat.

    def held_back(self) -> bool:
        """True if only readers are in the way of a Grant."""
        shards = self.shards.values()
        free = all(s.may_grant() or s.held_back() or s.crowded() for s in shards)
        return free and any(s.held_back() for s in shards)

    def crowded(self) -> bool:
        """True if a shard has room for a Grant only by giving up the last protected snapshot."""
        return any(slots.crowded() for slots in self.shards.values())

    def unmade(self) -> bool:
        """True if a shard waits for memory for its next snapshot."""
        return any(slots.unmade() for slots in self.shards.values())

    def held(self) -> tuple[m.HeldSnapshot, ...]:
        """Committed snapshots that every shard here has, the newest first.

        Those of sources count where the new arenas are of the same shards: a failure takes
        the sources again.
        """
        found = {
            one.snapshot: one for one in committed_in_all([s.slots for s in self.shards.values()])
        }
        if any(source.same_layout for source in self.sources.values()):
            older = committed_in_all([source.slots for source in self.sources.values()])
            found = {one.snapshot: one for one in older} | found
        return tuple(found[snapshot] for snapshot in sorted(found, reverse=True))


Reaction = Callable[[NodeMachine, Any], None]

ORDERS: dict[type[m.Message], Reaction] = {
    m.Grant: NodeMachine._grant,
    m.Encode: NodeMachine._encode,
    m.Commit: NodeMachine._commit,
    m.Abort: NodeMachine._abort,
    m.Rebuild: NodeMachine._rebuild,
    m.Load: NodeMachine._load,
    m.Reshape: NodeMachine._reshape,
    m.Adopt: NodeMachine._adopt,
    m.Hold: NodeMachine._pin,
    m.Unhold: lambda machine, message: machine.reader_gone(message.reader),
}
"""Requests of the coordinator."""

REPORTS: dict[type[m.Message], Reaction] = {
    m.Begins: NodeMachine._begins,
    m.Sealed: NodeMachine._sealed,
    m.Missed: NodeMachine._gave_up,
    m.Abandoned: NodeMachine._gave_up,
    m.Encoded: NodeMachine._encoded,
    m.Rebuilt: NodeMachine._rebuilt,
    m.Reshaped: NodeMachine._reshaped,
    m.OrderDone: NodeMachine._report,
    m.OrderFailed: NodeMachine._report,
}
"""Messages of trainers and encoders, which are not answered."""

REACTIONS: dict[type[m.Message], Reaction] = {
    **ORDERS,
    **REPORTS,
    m.Loaded: NodeMachine._loaded,
    m.Pin: NodeMachine._pin,
    m.Unpin: lambda machine, message: machine.reader_gone(message.reader),
}
