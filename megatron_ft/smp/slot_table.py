"""The headers of one arena's slots, and which of them have changed."""

from __future__ import annotations

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc.refusals import TransitionRefusedError

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


class SlotTable:
    """Headers of one shard's slots; every change goes through ``put`` and is collected.

    ``changes`` lists (slot, header) in the order in which they must be stored.
    """

    def __init__(self, shard_id: str, slots: list[SlotHeader]) -> None:
        self.shard_id = shard_id
        self.slots = list(slots)
        self.changes: list[tuple[int, SlotHeader]] = []

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

    def put(self, index: int, header: SlotHeader) -> None:
        """Change the header of a slot."""
        self.slots[index] = header
        self.changes.append((index, header))

    def free(self, index: int) -> None:
        """Make a slot FREE, whatever it held."""
        self.put(index, EMPTY_SLOT)

    def expect(self, snapshot: SnapshotId, *states: SlotState) -> int:
        """The slot of ``snapshot``; TransitionRefusedError unless it is in one of ``states``."""
        index = self.find(snapshot)
        if index is None:
            raise TransitionRefusedError(f"{self.shard_id} has no slot with snapshot {snapshot}")
        if self.slots[index].state not in states:
            raise TransitionRefusedError(
                f"{self.shard_id} slot {index} with snapshot {snapshot} is "
                f"{self.slots[index].state.name}, not {'/'.join(s.name for s in states)}"
            )
        return index
