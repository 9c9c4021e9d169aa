"""The slots of one arena as a state machine: section "states" of docs/protocol.md as code.

Pure: no memory is touched here.  Every change goes through ``_put`` and is collected,
so that the caller can store the headers in the same order.  Each rule that keeps a
snapshot alive is a method of its own; the model test switches them off one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.errors import MegatronFTError
from megatron_ft.identity import SealedRecord, SnapshotId

NO_ROOT = bytes(32)
EMPTY_SLOT = SlotHeader(
    state=SlotState.FREE,
    snapshot=None,
    iteration=-1,
    local_only=False,
    record=None,
    parity_valid=False,
    parity_root=NO_ROOT,
    stripe_table=(),
)


class TransitionRefusedError(MegatronFTError):
    """The slot is not in a state in which the request makes sense; nothing was changed."""


class PinnedError(TransitionRefusedError):
    """There would be room for a snapshot if a reader did not hold what lies there."""


class WorldGoneError(TransitionRefusedError):
    """The message belongs to an encoder world that is not, or no longer, the node's."""


class ShardSlots:
    """All slots of one shard's arena, and which of them a live writer may still touch.

    ``changes`` lists (slot, header) in the order in which they must be stored.
    A slot that was aborted while its writer was alive is *ending*: its header has lost
    its iteration, so that a restarted SMP knows it too.  It becomes free only when that
    writer says that it has stopped, or has died.

    ``pins`` names the snapshot that each reader is reading.  They are not in any header:
    a restarted SMP has none, and readers look at headers again after their last read.
    """

    def __init__(self, shard_id: str, slots: list[SlotHeader]) -> None:
        self.shard_id = shard_id
        self.slots = list(slots)
        self.changes: list[tuple[int, SlotHeader]] = []
        self.pins: dict[str, SnapshotId] = {}

    def find(self, snapshot: SnapshotId) -> int | None:
        """The slot that belongs to ``snapshot``, if one does."""
        for index, slot in enumerate(self.slots):
            if slot.state != SlotState.FREE and slot.snapshot == snapshot:
                return index
        return None

    def take_changes(self) -> list[tuple[int, SlotHeader]]:
        """Changes since the last call, oldest first."""
        taken, self.changes = self.changes, []
        return taken

    def _put(self, index: int, header: SlotHeader) -> None:
        self.slots[index] = header
        self.changes.append((index, header))

    def _expect(self, snapshot: SnapshotId, *states: SlotState) -> int:
        index = self.find(snapshot)
        if index is None:
            raise TransitionRefusedError(f"{self.shard_id} has no slot with snapshot {snapshot}")
        if self.slots[index].state not in states:
            raise TransitionRefusedError(
                f"{self.shard_id} slot {index} with snapshot {snapshot} is "
                f"{self.slots[index].state.name}, not {'/'.join(s.name for s in states)}"
            )
        return index

    def may_reuse(self, index: int) -> bool:
        """Whether a slot's bytes may be given up for a newer snapshot.

        Only a committed slot ever qualifies, so one in doubt waits for its outcome.
        It does when a newer protected one is committed here (which the coordinator
        says only after all arenas hold it), or, for a local-only one, when anything
        at least as safe stays behind.
        """
        slot = self.slots[index]
        if slot.state != SlotState.COMMITTED:
            return slot.state == SlotState.FREE
        assert slot.snapshot is not None
        others = [
            other
            for position, other in enumerate(self.slots)
            if position != index and other.state == SlotState.COMMITTED
        ]
        if slot.local_only:
            return any(o.local_only is False or _newer(o, slot) for o in others)
        return any(not o.local_only and _newer(o, slot) for o in others)

    def ending(self, index: int) -> bool:
        """Whether the slot was aborted while a live writer might still touch it."""
        slot = self.slots[index]
        return slot.state != SlotState.FREE and slot.iteration == EMPTY_SLOT.iteration

    def may_grant(self) -> bool:
        """Whether there is room for a new snapshot and the trainer has stopped with the last.

        There is one permit word: a new permit would hide from a trainer that has not begun
        yet that the one before was revoked, and the slot of that one would never be free.
        """
        capturing = any(slot.state == SlotState.CAPTURING for slot in self.slots)
        return not capturing and self.victim() is not None

    def held_back(self) -> bool:
        """Whether ``may_grant`` would hold if there were no readers."""
        capturing = any(slot.state == SlotState.CAPTURING for slot in self.slots)
        return not capturing and self.victim() is None and self._oldest_reusable() is not None

    def victim(self) -> int | None:
        """The slot for the next snapshot: a free one, else the oldest that nobody needs."""
        return self._oldest_reusable(spared=self.pins.values())

    def _oldest_reusable(self, spared: Collection[SnapshotId] = ()) -> int | None:
        usable = [
            i
            for i, slot in enumerate(self.slots)
            if self.may_reuse(i) and (slot.state == SlotState.FREE or slot.snapshot not in spared)
        ]
        return min(usable, key=lambda i: _age(self.slots[i]), default=None)

    def check_pinnable(self, snapshot: SnapshotId) -> None:
        """TransitionRefusedError unless the snapshot is complete here."""
        index = self._expect(snapshot, SlotState.SEALED, SlotState.PROTECTED, SlotState.COMMITTED)
        assert not self.ending(index)

    def pin(self, reader: str, snapshot: SnapshotId) -> None:
        """Keep the slot of a complete snapshot from being granted until ``unpin``.

        What must not wait for a reader (abort, rebuild, a new lineage) does not: the slot
        then changes its header before its bytes, as the reader will see.
        """
        self.check_pinnable(snapshot)
        self.pins[reader] = snapshot

    def unpin(self, reader: str) -> None:
        """The reader is done, or dead."""
        self.pins.pop(reader, None)

    def grant(self, snapshot: SnapshotId, iteration: int) -> int:
        """Give a slot to the trainer: FREE to CAPTURING.  Returns the slot's number."""
        index = self.victim()
        if self.held_back():
            raise PinnedError(f"{self.shard_id} has no slot for {snapshot} but those being read")
        if index is None or not self.may_grant():
            raise TransitionRefusedError(f"{self.shard_id} has no free slot for {snapshot}")
        self._put(
            index,
            replace(EMPTY_SLOT, state=SlotState.CAPTURING, snapshot=snapshot, iteration=iteration),
        )
        return index

    def seal(self, record: SealedRecord) -> bool:
        """The trainer has finished: CAPTURING to SEALED, or to FREE if it was aborted meanwhile.

        Returns whether the slot is sealed.
        """
        index = self._expect(record.snapshot, SlotState.CAPTURING)
        if self.ending(index):
            self._free(index)
            return False
        self._put(index, replace(self.slots[index], state=SlotState.SEALED, record=record))
        return True

    def capture_ended(self, snapshot: SnapshotId | None = None) -> list[SnapshotId]:
        """The trainer does not write (any more) to slots in CAPTURING: they become FREE.

        With ``snapshot`` only that one.  Returns the snapshots that were given up.
        """
        return self._end(SlotState.CAPTURING, self._free, snapshot)

    def encoding_begun(self, snapshot: SnapshotId) -> bool:
        """Whether parity of the snapshot is being made, or complete and not decided upon yet."""
        index = self.find(snapshot)
        states = (SlotState.ENCODING, SlotState.PROTECTED)
        return index is not None and self.slots[index].state in states and not self.ending(index)

    def begin_encode(self, snapshot: SnapshotId) -> int:
        """SEALED (or protected in doubt) to ENCODING; parity is invalid from here on."""
        index = self._expect(snapshot, SlotState.SEALED, SlotState.PROTECTED, SlotState.ENCODING)
        if self.slots[index].state == SlotState.ENCODING:
            raise TransitionRefusedError(f"{self.shard_id} is being encoded by another world")
        self._put(index, self._without_parity(index, SlotState.ENCODING))
        return index

    def protect(
        self, snapshot: SnapshotId, parity_root: bytes, table: tuple[SealedRecord, ...]
    ) -> None:
        """Parity is complete and verified and the stripe's table known: ENCODING to PROTECTED."""
        index = self._expect(snapshot, SlotState.ENCODING)
        if self.ending(index):
            # Its iteration is gone from the header: protected, it could be committed without one.
            raise TransitionRefusedError(f"{self.shard_id}: {snapshot} was given up")
        self._put(
            index,
            replace(
                self.slots[index],
                state=SlotState.PROTECTED,
                parity_valid=True,
                parity_root=parity_root,
                stripe_table=table,
            ),
        )

    def encoder_gone(self) -> list[SnapshotId]:
        """No encoder can write any more: ENCODING falls back to SEALED, a rebuild target to FREE.

        Returns snapshots that were aborted earlier and are free now.
        """
        self._end(SlotState.REBUILDING, self._free)
        freed: list[SnapshotId] = []
        for index, slot in enumerate(self.slots):
            if slot.state != SlotState.ENCODING:
                continue
            if self.ending(index):
                assert slot.snapshot is not None
                freed.append(slot.snapshot)
                self._free(index)
            else:
                self._put(index, self._without_parity(index, SlotState.SEALED))
        return freed

    def commit(self, snapshot: SnapshotId, *, local_only: bool) -> None:
        """The coordinator's word: COMMITTED.  Repeating it changes nothing."""
        index = self._expect(snapshot, SlotState.SEALED, SlotState.PROTECTED, SlotState.COMMITTED)
        slot = self.slots[index]
        if slot.state == SlotState.SEALED and not local_only:
            raise TransitionRefusedError(f"{self.shard_id} has no parity for {snapshot}")
        if slot.state == SlotState.COMMITTED and slot.local_only <= local_only:
            return
        self._put(index, replace(slot, state=SlotState.COMMITTED, local_only=local_only))

    def abort(self, snapshot: SnapshotId, *, trainer_alive: bool, encoder_alive: bool) -> bool:
        """Give a snapshot up.  Returns whether its slot is free already.

        A slot that a live writer may still touch is only marked: a token cannot stop a
        process that has been suspended with its mapping.
        """
        index = self.find(snapshot)
        if index is None:
            return True
        state = self.slots[index].state
        if state == SlotState.COMMITTED:
            raise TransitionRefusedError(f"{self.shard_id}: {snapshot} is committed already")
        if self.still_written(state, trainer_alive, encoder_alive):
            self._put(index, replace(self.slots[index], iteration=EMPTY_SLOT.iteration))
            return False
        self._free(index)
        return True

    def still_written(self, state: SlotState, trainer_alive: bool, encoder_alive: bool) -> bool:
        """Whether some live process may yet write into a slot in ``state``."""
        if state == SlotState.CAPTURING:
            return trainer_alive
        return state in (SlotState.ENCODING, SlotState.REBUILDING) and encoder_alive

    def repairable(self, snapshot: SnapshotId) -> int:
        """The slot of a committed snapshot with parity: single blocks of it can be repaired.

        It stays COMMITTED meanwhile: what is written is proved by the roots in its header.
        """
        index = self._expect(snapshot, SlotState.COMMITTED)
        if not self.slots[index].parity_valid:
            raise TransitionRefusedError(f"{self.shard_id} has no parity of {snapshot}")
        return index

    def begin_rebuild(self, snapshot: SnapshotId, iteration: int) -> int:
        """Make a slot the target of a rebuild: lost until its digests have matched."""
        index = self.find(snapshot)
        if index is None:
            index = self._oldest_reusable()
        if index is None:
            raise TransitionRefusedError(f"{self.shard_id} has no slot to rebuild {snapshot} in")
        self._put(
            index,
            replace(EMPTY_SLOT, state=SlotState.REBUILDING, snapshot=snapshot, iteration=iteration),
        )
        return index

    def rebuilt(
        self, record: SealedRecord, parity_root: bytes, table: tuple[SealedRecord, ...]
    ) -> None:
        """The rebuild target matches its digests: REBUILDING to PROTECTED."""
        index = self._expect(record.snapshot, SlotState.REBUILDING)
        if self.ending(index):
            raise TransitionRefusedError(f"{self.shard_id}: {record.snapshot} was given up")
        self._put(
            index,
            SlotHeader(
                state=SlotState.PROTECTED,
                snapshot=record.snapshot,
                iteration=record.iteration,
                local_only=False,
                record=record,
                parity_valid=True,
                parity_root=parity_root,
                stripe_table=table,
            ),
        )

    def loaded(self, record: SealedRecord) -> None:
        """What came from disk matches its digests: REBUILDING to SEALED, without parity."""
        index = self._expect(record.snapshot, SlotState.REBUILDING)
        if self.ending(index) or self.slots[index].iteration != record.iteration:
            raise TransitionRefusedError(f"{self.shard_id} does not wait for {record.snapshot}")
        self._put(index, replace(self.slots[index], state=SlotState.SEALED, record=record))

    def forget(self, unwanted: Callable[[SnapshotId], bool]) -> None:
        """Free every slot whose snapshot is ``unwanted``; its writers must be dead."""
        for index, slot in enumerate(self.slots):
            if slot.snapshot is not None and unwanted(slot.snapshot):
                self._free(index)

    def _free(self, index: int) -> None:
        self._put(index, EMPTY_SLOT)

    def _without_parity(self, index: int, state: SlotState) -> SlotHeader:
        return replace(
            self.slots[index],
            state=state,
            parity_valid=False,
            parity_root=NO_ROOT,
            stripe_table=(),
        )

    def _end(
        self,
        state: SlotState,
        action: Callable[[int], None],
        snapshot: SnapshotId | None = None,
    ) -> list[SnapshotId]:
        ended: list[SnapshotId] = []
        for index, slot in enumerate(self.slots):
            if slot.state == state and snapshot in (None, slot.snapshot):
                assert slot.snapshot is not None
                ended.append(slot.snapshot)
                action(index)
        return ended


def _newer(one: SlotHeader, other: SlotHeader) -> bool:
    assert one.snapshot is not None and other.snapshot is not None
    return one.snapshot > other.snapshot


def _age(slot: SlotHeader) -> tuple[int, int]:
    return (-1, -1) if slot.snapshot is None else (slot.snapshot[0], slot.snapshot[1])
