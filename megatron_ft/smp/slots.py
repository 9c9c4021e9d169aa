"""The slots of one arena as a state machine: "One slot" of docs/explanation/protocol.md.

Pure: no memory is touched here.  Changes are collected, so that the caller can store the headers
in the same order.  The rules that keep a snapshot alive are in slot_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import PinnedError, TransitionRefusedError
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.slot_rules import (
    EMPTY_SLOT,
    NO_ROOT,
    capturing,
    committed_local,
    ending,
    is_committed,
    oldest_reusable,
    reusable,
    still_written,
    without_lost,
)


class Promise(NamedTuple):
    """The slot of a permit, until its trainer begins to write."""

    snapshot: SnapshotId
    iteration: int
    slot: int
    give_up_protected: bool
    lost: SnapshotId | None = None


class ShardSlots:
    """All slots of one shard's arena, from permit to commit or abort, and who reads them.

    A slot that was aborted while its writer was alive is *ending*: its header has lost
    its iteration, so that a restarted SMP knows it too.  It becomes free only when that
    writer says that it has stopped, or has died.

    ``promise`` is the slot that a permit names.  Its header and bytes stay what they are until
    the trainer begins.  It is in no header: a restarted SMP has promised nothing, and the
    snapshot is given up.

    ``made`` is how many slots, from the first on, have memory; the others are FREE until then.

    ``pins`` names the snapshot that each reader is reading.  They are not in any header:
    a restarted SMP has none, and readers look at headers again after their last read.

    Every change of a header goes through ``put``.  ``changes`` lists (slot, header) in the order
    in which they must be stored.
    """

    def __init__(self, shard_id: str, slots: list[SlotHeader]) -> None:
        self.shard_id = shard_id
        self.slots = list(slots)
        self.changes: list[tuple[int, SlotHeader]] = []
        self.pins: dict[str, SnapshotId] = {}
        self.promise: Promise | None = None
        self.made = len(self.slots)

    def find(self, snapshot: SnapshotId) -> int | None:
        for index, slot in enumerate(self.slots):
            if slot.state != SlotState.FREE and slot.snapshot == snapshot:
                return index
        return None

    def slot_of(self, snapshot: SnapshotId) -> int:
        """As ``find``; TransitionRefusedError if there is none."""
        index = self.find(snapshot)
        if index is None:
            raise TransitionRefusedError(f"{self.shard_id} has no slot with snapshot {snapshot}")
        return index

    def take_changes(self) -> list[tuple[int, SlotHeader]]:
        """Changes since the last call, oldest first."""
        taken, self.changes = self.changes, []
        return taken

    def put(self, index: int, header: SlotHeader) -> None:
        self.slots[index] = header
        self.changes.append((index, header))

    def change(self, index: int, **changes: Any) -> None:
        """Change these fields of a slot's header."""
        self.put(index, replace(self.slots[index], **changes))

    def free(self, index: int) -> None:
        self.put(index, EMPTY_SLOT)

    def expect(self, snapshot: SnapshotId, *states: SlotState) -> int:
        """The slot of ``snapshot``; TransitionRefusedError unless it is in one of ``states``."""
        index = self.slot_of(snapshot)
        if self.slots[index].state not in states:
            raise TransitionRefusedError(
                f"{self.shard_id} slot {index} with snapshot {snapshot} is "
                f"{self.slots[index].state.name}, not {'/'.join(s.name for s in states)}"
            )
        return index

    # Permits and pins.

    def may_grant(self, *, give_up_protected: bool = False, lost: SnapshotId | None = None) -> bool:
        """True if there is room for a new snapshot and the trainer has stopped with the last."""
        return not capturing(self.slots) and self.victim(give_up_protected, lost) is not None

    def held_back(self) -> bool:
        """True if only readers are in the way of the next snapshot."""
        if capturing(self.slots) or self.victim() is not None:
            return False
        if self.crowded():
            return self.victim(give_up_protected=True) is None
        return oldest_reusable(self._made) is not None

    def crowded(self) -> bool:
        """True if there is room only by giving up the last protected snapshot."""
        room = oldest_reusable(self._made, give_up_protected=True) is not None
        return room and not capturing(self.slots) and oldest_reusable(self._made) is None

    def unmade(self) -> bool:
        """True if the next snapshot waits for the memory of further slots."""
        return self.made < len(self.slots) and self.victim() is None

    @property
    def _made(self) -> list[SlotHeader]:
        return self.slots[: self.made]

    def victim(self, give_up_protected: bool = False, lost: SnapshotId | None = None) -> int | None:
        """The slot for the next snapshot, None if all are needed or read.

        With ``give_up_protected`` the last protected one, if no other is left.  ``lost`` is a
        committed snapshot that nothing can be restored from.
        """
        spared = self.pins.values()
        made = without_lost(self._made, lost, spared)
        index = oldest_reusable(made, spared)
        if index is None and give_up_protected:
            return oldest_reusable(made, spared, give_up_protected=True)
        return index

    def check_pinnable(self, snapshot: SnapshotId) -> None:
        """TransitionRefusedError unless the snapshot is complete here."""
        index = self.find(snapshot)
        if index is not None and committed_local(self.slots[index]):
            return
        index = self.expect(snapshot, SlotState.SEALED, SlotState.PROTECTED, SlotState.COMMITTED)
        assert not ending(self.slots[index])

    def pin(self, reader: str, snapshot: SnapshotId) -> None:
        """Keep the slot of a complete snapshot from being granted until ``unpin``.

        What must not wait for a reader (abort, rebuild, a new lineage) does not: the slot
        then changes its header before its bytes, as the reader will see.
        """
        self.check_pinnable(snapshot)
        self.pins[reader] = snapshot

    def unpin(self, reader: str) -> None:
        self.pins.pop(reader, None)

    def grant(
        self,
        snapshot: SnapshotId,
        iteration: int,
        *,
        give_up_protected: bool = False,
        lost: SnapshotId | None = None,
    ) -> int:
        """Promise a slot to the trainer; its content stays.  Returns the slot's number."""
        index = self.victim(give_up_protected, lost)
        if self.held_back():
            raise PinnedError(f"{self.shard_id} has no slot for {snapshot} but those being read")
        if index is None or capturing(self.slots):
            raise TransitionRefusedError(f"{self.shard_id} has no free slot for {snapshot}")
        self.promise = Promise(snapshot, iteration, index, give_up_protected, lost)
        return index

    def begin_capture(self, snapshot: SnapshotId) -> None:
        """The trainer is about to write: what the promised slot held is given up, CAPTURING.

        A reader that has come since the promise goes before.  A promise that cannot be kept
        stands until its trainer gives it up: then the coordinator learns that it is over.
        """
        index = self.find(snapshot)
        if index is not None and not ending(self.slots[index]):
            return
        promise = self.promise
        if promise is None or promise.snapshot != snapshot:
            raise TransitionRefusedError(f"{self.shard_id} has promised no slot for {snapshot}")
        give_up, spared = promise.give_up_protected, self.pins.values()
        slots = without_lost(self.slots, promise.lost, spared)
        if promise.slot not in reusable(slots, spared, give_up_protected=give_up):
            raise TransitionRefusedError(f"the slot promised to {snapshot} is needed or read")
        self.promise = None
        begun = replace(EMPTY_SLOT, state=SlotState.CAPTURING, snapshot=snapshot)
        self.put(promise.slot, replace(begun, iteration=promise.iteration))

    def promised(self, snapshot: SnapshotId) -> bool:
        """True if the trainer has a permit for the snapshot and has not begun."""
        return self.promise is not None and self.promise.snapshot == snapshot

    def seal(self, record: SealedRecord) -> bool:
        """The trainer has finished: CAPTURING to SEALED, or to FREE if it was aborted meanwhile.

        Returns whether the slot is sealed.
        """
        index = self.expect(record.snapshot, SlotState.CAPTURING)
        if ending(self.slots[index]):
            self.free(index)
            return False
        self.change(index, state=SlotState.SEALED, record=record)
        return True

    def capture_ended(self, snapshot: SnapshotId | None = None) -> list[SnapshotId]:
        """The trainer does not write (any more) to slots in CAPTURING: they become FREE.

        With ``snapshot`` only that one.  Returns the snapshots that were given up, promised
        ones among them.
        """
        ended = self._free_all(SlotState.CAPTURING, snapshot)
        if self.promise is not None and snapshot in (None, self.promise.snapshot):
            ended.append(self.promise.snapshot)
            self.promise = None
        return ended

    def encoding_begun(self, snapshot: SnapshotId) -> bool:
        """True if parity of the snapshot is being made, or complete and not decided upon yet."""
        index = self.find(snapshot)
        if index is None:
            return False
        slot = self.slots[index]
        return slot.state in (SlotState.ENCODING, SlotState.PROTECTED) and not ending(slot)

    def begin_encode(self, snapshot: SnapshotId) -> int:
        """SEALED (or protected in doubt) to ENCODING; parity is invalid from here on.

        One that is committed as local keeps that mark meanwhile, and falls back to it.
        """
        index = self.expect(
            snapshot,
            SlotState.SEALED,
            SlotState.PROTECTED,
            SlotState.ENCODING,
            SlotState.COMMITTED,
        )
        slot = self.slots[index]
        if slot.state == SlotState.ENCODING:
            raise TransitionRefusedError(f"{self.shard_id} is being encoded by another world")
        if slot.state == SlotState.COMMITTED and not slot.local_only:
            raise TransitionRefusedError(f"{self.shard_id} has parity for {snapshot} already")
        self.put(index, self._without_parity(index, SlotState.ENCODING))
        return index

    def protect(
        self, snapshot: SnapshotId, parity_root: bytes, table: tuple[SealedRecord, ...]
    ) -> None:
        """Parity is complete and verified and the stripe's table known: ENCODING to PROTECTED."""
        index = self.expect(snapshot, SlotState.ENCODING)
        if ending(self.slots[index]):
            # Its iteration is gone from the header: protected, it could be committed without one.
            raise TransitionRefusedError(f"{self.shard_id}: {snapshot} was given up")
        known = {"parity_root": parity_root, "stripe_table": table}
        self.change(index, state=SlotState.PROTECTED, parity_valid=True, **known)

    def encoder_gone(self) -> list[SnapshotId]:
        """No encoder can write any more: ENCODING falls back to SEALED, a rebuild target to FREE.

        What had been committed as local falls back to that.
        Returns snapshots that were aborted earlier and are free now.
        """
        self._free_all(SlotState.REBUILDING)
        freed: list[SnapshotId] = []
        for index, slot in enumerate(self.slots):
            if slot.state != SlotState.ENCODING:
                continue
            if ending(slot):
                assert slot.snapshot is not None
                freed.append(slot.snapshot)
                self.free(index)
            else:
                before = SlotState.COMMITTED if slot.local_only else SlotState.SEALED
                self.put(index, self._without_parity(index, before))
        return freed

    def commit(self, snapshot: SnapshotId, *, local_only: bool) -> None:
        """The coordinator's decision: COMMITTED.  Repeating it changes nothing."""
        index = self.expect(snapshot, SlotState.SEALED, SlotState.PROTECTED, SlotState.COMMITTED)
        slot = self.slots[index]
        if slot.state == SlotState.SEALED and not local_only:
            raise TransitionRefusedError(f"{self.shard_id} has no parity for {snapshot}")
        if slot.state == SlotState.COMMITTED and slot.local_only <= local_only:
            return
        self.change(index, state=SlotState.COMMITTED, local_only=local_only)

    def abort(self, snapshot: SnapshotId, *, trainer_alive: bool, encoder_alive: bool) -> bool:
        """Give a snapshot up.  Returns whether its slot is free already.

        A slot that a live writer may still touch is only marked: a token cannot stop a
        process that has been suspended with its mapping.
        """
        if self.promised(snapshot):
            self.promise = None
        index = self.find(snapshot)
        if index is None:
            return True
        state = self.slots[index].state
        if state == SlotState.COMMITTED or self.slots[index].local_only:
            raise TransitionRefusedError(f"{self.shard_id}: {snapshot} is committed already")
        if still_written(state, trainer_alive, encoder_alive):
            self.change(index, iteration=EMPTY_SLOT.iteration)
            return False
        self.free(index)
        return True

    def _without_parity(self, index: int, state: SlotState) -> SlotHeader:
        known = self.slots[index]
        return replace(known, state=state, parity_valid=False, parity_root=NO_ROOT, stripe_table=())

    def _free_all(self, state: SlotState, only: SnapshotId | None = None) -> list[SnapshotId]:
        """Free the slots in a state, or only that of one snapshot; the snapshots they held."""
        ended: list[SnapshotId] = []
        for index, slot in enumerate(self.slots):
            if slot.state == state and only in (None, slot.snapshot):
                assert slot.snapshot is not None
                ended.append(slot.snapshot)
                self.free(index)
        return ended

    # Recovery.

    def begin_rebuild(self, snapshot: SnapshotId, iteration: int) -> int:
        """Make a slot the target of a rebuild: lost until its digests have matched."""
        index = self.find(snapshot)
        if index is None:
            index = oldest_reusable(self.slots)
        if index is None:
            raise TransitionRefusedError(f"{self.shard_id} has no slot to rebuild {snapshot} in")
        self.put(
            index,
            replace(EMPTY_SLOT, state=SlotState.REBUILDING, snapshot=snapshot, iteration=iteration),
        )
        return index

    def rebuilt(
        self, record: SealedRecord, parity_root: bytes, table: tuple[SealedRecord, ...]
    ) -> None:
        """The rebuild target matches its digests: REBUILDING to PROTECTED."""
        index = self.expect(record.snapshot, SlotState.REBUILDING)
        if ending(self.slots[index]):
            raise TransitionRefusedError(f"{self.shard_id}: {record.snapshot} was given up")
        known = {"parity_root": parity_root, "stripe_table": table, "record": record}
        at = record.iteration
        self.change(index, state=SlotState.PROTECTED, iteration=at, parity_valid=True, **known)

    def loaded(self, record: SealedRecord) -> None:
        """A shard from disk matches its digests: REBUILDING to SEALED, without parity."""
        index = self.expect(record.snapshot, SlotState.REBUILDING)
        if ending(self.slots[index]) or self.slots[index].iteration != record.iteration:
            raise TransitionRefusedError(f"{self.shard_id} does not wait for {record.snapshot}")
        self.change(index, state=SlotState.SEALED, record=record)

    def forget(self, unwanted: Callable[[SnapshotId], bool]) -> None:
        """Free every slot whose snapshot is ``unwanted``; its writers must be dead."""
        for index, slot in enumerate(self.slots):
            if slot.snapshot is not None and unwanted(slot.snapshot):
                self.free(index)


def committed_in_all(shards: Sequence[Sequence[SlotHeader]]) -> list[m.HeldSnapshot]:
    """The committed snapshots that all of these shards have."""
    tables = [
        {s.snapshot: s for s in slots if s.snapshot is not None and is_committed(s)}
        for slots in shards
    ]
    common = set(tables[0]).intersection(*tables[1:]) if tables else ()
    return [
        m.HeldSnapshot(
            snapshot,
            tables[0][snapshot].iteration,
            all(not table[snapshot].local_only for table in tables),
        )
        for snapshot in common
    ]
