"""Rules of docs/explanation/protocol.md switched off, one by one: then something must be lost.

Each function patches the real machines, or what the model does in place of a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint import decide, drained
from megatron_ft.checkpoint import drained as retention
from megatron_ft.checkpoint.decide import Holding, usable
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp import slot_rules, slots, state_machine
from megatron_ft.smp.effects import StoreSlot
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.supervisor.cycle import Action, CyclePhase, SnapshotCycle
from tests.protocol.model import memory
from tests.protocol.model.disk import DiskSteps
from tests.protocol.model.drain import Drain
from tests.protocol.model.judge import Judge
from tests.protocol.model.memory import record_of
from tests.protocol.model.node import Node
from tests.protocol.model.processes import Process, Reader
from tests.protocol.model.world import World


def no_doubt(patch: pytest.MonkeyPatch) -> None:
    """A slot in doubt may be reused, and the next permit does not wait for all commits."""
    keep = slot_rules.may_reuse

    def may_reuse(
        headers: Sequence[SlotHeader], index: int, *, give_up_protected: bool = False
    ) -> bool:
        in_doubt = (SlotState.SEALED, SlotState.PROTECTED)
        may = keep(headers, index, give_up_protected=give_up_protected)
        return headers[index].state in in_doubt or may

    patch.setattr(slot_rules, "may_reuse", may_reuse)
    hasten(patch)


def hasten(patch: pytest.MonkeyPatch) -> None:
    """The first node's answer to a commit counts for all."""
    keep = SnapshotCycle.answered

    def answered(
        self: SnapshotCycle, node: str, request: m.Message, answer: m.Message
    ) -> list[Action]:
        if isinstance(request, m.Commit) and request.snapshot == self.snapshot:
            self._waiting &= {node}
        return keep(self, node, request, answer)

    patch.setattr(SnapshotCycle, "answered", answered)


def local_is_enough(patch: pytest.MonkeyPatch) -> None:
    """The last protected snapshot may be given up for a newer one that is only local."""
    keep = slot_rules.may_reuse

    def may_reuse(
        headers: Sequence[SlotHeader], index: int, *, give_up_protected: bool = False
    ) -> bool:
        return keep(headers, index, give_up_protected=True)

    patch.setattr(slot_rules, "may_reuse", may_reuse)


def protected_is_enough(patch: pytest.MonkeyPatch) -> None:
    """The newest snapshot may be given up for a capture if it is local and an older one is not."""
    keep = slot_rules.may_reuse

    def may_reuse(
        headers: Sequence[SlotHeader], index: int, *, give_up_protected: bool = False
    ) -> bool:
        slot, others = headers[index], (h for i, h in enumerate(headers) if i != index)
        local = slot.state == SlotState.COMMITTED and slot.local_only
        if local and any(o.state == SlotState.COMMITTED and not o.local_only for o in others):
            return True
        return keep(headers, index, give_up_protected=give_up_protected)

    patch.setattr(slot_rules, "may_reuse", may_reuse)


def per_rank_skip(patch: pytest.MonkeyPatch) -> None:
    """A rank that missed the iteration is left out, the others continue."""

    def gave_up(self: SnapshotCycle, body: m.Missed | m.Abandoned) -> list[Action]:
        if body.snapshot != self.snapshot or self.phase != CyclePhase.CAPTURING:
            return []
        record = record_of(self.snapshot, body.shard_id, self.iteration)
        return self._sealed(m.Sealed(record))

    patch.setattr(SnapshotCycle, "_gave_up", gave_up)


def iteration_is_identity(patch: pytest.MonkeyPatch) -> None:
    """A slot with the right iteration is taken for the snapshot, of any incarnation."""
    patch.setattr(state_machine, "on_lineage", lambda snapshot, lineage: True)
    iterations: dict[SnapshotId, int] = {}

    def granted(self: Judge, snapshot: SnapshotId, iteration: int) -> None:
        iterations[snapshot] = iteration
        keep(self, snapshot, iteration)

    def slot(self: Holding, snapshot: SnapshotId) -> SlotHeader | None:
        same = [s for s in self.arena.slots if s.iteration == iterations[snapshot] and usable(s)]
        return same[-1] if same else None

    keep = Judge.granted
    patch.setattr(Judge, "granted", granted)
    patch.setattr(Holding, "slot", slot)


def no_lineage(patch: pytest.MonkeyPatch) -> None:
    """What was rolled back counts as a part of the job's past."""
    patch.setattr(decide, "on_lineage", lambda snapshot, lineage: True)
    patch.setattr(state_machine, "on_lineage", lambda snapshot, lineage: True)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A new incarnation is let in while writers of the old one are alive."""

    def fence(self: World, node: Node, ranks: tuple[int, ...]) -> None:
        for process in list(node.writers):
            if process.suspended:
                node.writers.remove(process)
                self._leave(node, process)
        keep(self, node, ranks)

    keep = World.fence
    patch.setattr(World, "fence", fence)


def word_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A trainer that answers LetGo is believed, without a look at its mappings."""
    patch.setattr(World, "proven", lambda self, trainer: True)


def no_wait_for_writers(patch: pytest.MonkeyPatch) -> None:
    """An encoder counts as gone when it was told to go, not when it is dead."""

    def evict(self: World, at: Node, rival: Process) -> None:
        at.writers.remove(rival)
        self._leave(at, rival)

    patch.setattr(World, "evict", evict)
    patch.setattr(
        World, "may_start_world", lambda self, incarnation: not incarnation.usable_world(self)
    )
    patch.setattr(slots, "still_written", lambda state, trainer, encoder: False)
    keep = SnapshotCycle._break

    def at_once(self: SnapshotCycle, reason: str) -> list[Action]:
        actions = keep(self, reason)
        return actions + self._abort(reason) if actions else []

    patch.setattr(SnapshotCycle, "_break", at_once)


def encode_early(patch: pytest.MonkeyPatch) -> None:
    """Encoding starts when the first rank has sealed."""
    patch.setattr(SnapshotCycle, "_all_sealed", lambda self: True)


def digests_at_home(patch: pytest.MonkeyPatch) -> None:
    """Each member stores its own digests only, so they are lost with it."""
    keep = ShardSlots.protect

    def protect(
        self: ShardSlots, snapshot: SnapshotId, root: bytes, table: tuple[SealedRecord, ...]
    ) -> None:
        keep(self, snapshot, root, tuple(r for r in table if r.shard_id == self.shard_id))

    patch.setattr(ShardSlots, "protect", protect)


def parity_stays_valid(patch: pytest.MonkeyPatch) -> None:
    """Parity is not marked invalid before its first byte is written anew."""
    keep = ShardSlots.begin_encode

    def begin_encode(self: ShardSlots, snapshot: SnapshotId) -> int:
        index = keep(self, snapshot)
        table = tuple(record_of(snapshot, f"dp{i}", self.slots[index].iteration) for i in range(6))
        self.put(index, replace(self.slots[index], parity_valid=True, stripe_table=table))
        return index

    def without_parity(self: ShardSlots, index: int, state: SlotState) -> SlotHeader:
        return replace(self.slots[index], state=state)

    patch.setattr(ShardSlots, "_without_parity", without_parity)
    patch.setattr(ShardSlots, "begin_encode", begin_encode)


def target_counts_as_whole(patch: pytest.MonkeyPatch) -> None:
    """A rebuild target counts before its digests have matched."""

    def begin_rebuild(table: ShardSlots, snapshot: SnapshotId, iteration: int) -> int:
        index = keep(table, snapshot, iteration)
        record = record_of(snapshot, table.shard_id, iteration)
        target = replace(table.slots[index], state=SlotState.REBUILDING, record=record)
        table.put(index, target)
        return index

    keep = ShardSlots.begin_rebuild
    patch.setattr(ShardSlots, "begin_rebuild", begin_rebuild)
    keep_gone = ShardSlots.encoder_gone

    def encoder_gone(self: ShardSlots) -> list[SnapshotId]:
        for index, slot in enumerate(self.slots):
            if slot.state == SlotState.REBUILDING:
                self.put(index, replace(slot, state=SlotState.SEALED))
        return keep_gone(self)

    patch.setattr(ShardSlots, "encoder_gone", encoder_gone)


def anybody_owns(patch: pytest.MonkeyPatch) -> None:
    """What lies on a node that no longer is the shard's place counts as the shard."""
    patch.setattr(memory, "owned", lambda inventories, places: [*inventories.values()])


def shadows(patch: pytest.MonkeyPatch) -> None:
    """Headers are stored in another order than the one in which they were decided."""

    def collect_changes(self: state_machine.NodeMachine) -> None:
        stores = [
            StoreSlot(shard_id, slot, header)
            for shard_id, slots in self.shards.items()
            for slot, header in slots.take_changes()
        ]
        self.effects = [*stores, *self.effects, *self._after]
        self._after = []

    patch.setattr(state_machine.NodeMachine, "_collect_changes", collect_changes)


def no_pins(patch: pytest.MonkeyPatch) -> None:
    """A slot is reused in spite of its readers."""
    patch.setattr(ShardSlots, "pin", lambda self, reader, snapshot: None)


def no_second_look(patch: pytest.MonkeyPatch) -> None:
    """A reader trusts its pin although the SMP that gave it is gone."""
    patch.setattr(Reader, "unchanged", lambda self: True)


def lease_ends_nobody(patch: pytest.MonkeyPatch) -> None:
    """A node that is cut off trains on although its lease has run out."""
    patch.setattr(World, "obey_lease", lambda self, node: None)


def replaced_at_once(patch: pytest.MonkeyPatch) -> None:
    """A silent node is replaced before its lease has run out."""
    patch.setattr(World, "leases", lambda self: False)


def late_words_obeyed(patch: pytest.MonkeyPatch) -> None:
    """An SMP does what the coordinator of an older incarnation says."""
    patch.setattr(World, "stale", lambda self, node, request: False)
    patch.setattr(state_machine.NodeMachine, "check_incarnation", lambda self, message: None)


def any_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A drained checkpoint is taken although the job was rolled back to before it."""
    patch.setattr(drained, "on_lineage", lambda snapshot, lineage: True)


def tidied_by_an_older_incarnation(patch: pytest.MonkeyPatch) -> None:
    """A drain of an older incarnation removes what it does not know."""
    patch.setattr(retention, "_later", lambda snapshot, lineage: False)


def published_and_tidied_at_once(patch: pytest.MonkeyPatch) -> None:
    """The process that publishes removes older checkpoints too, also when its incarnation is
    over."""

    def tidy_too(self: DiskSteps, drain: Drain) -> None:
        drain.stage = "tidying late"

    patch.setattr(DiskSteps, "_after_late_publish", tidy_too)


def drain_unpinned(patch: pytest.MonkeyPatch) -> None:
    """A drain reads slots that nobody keeps from being reused."""
    no_pins(patch)


def notes_ignored(patch: pytest.MonkeyPatch) -> None:
    """A recovery knows no lineage but that of the arenas that it finds."""
    keep = decide.candidates
    patch.setattr(decide, "candidates", lambda holdings, noted=(): keep(holdings))


def late_permits(patch: pytest.MonkeyPatch) -> None:
    """A permit that comes late, or again, is given once more."""
    patch.setattr(state_machine.NodeMachine, "too_late", lambda self, snapshot: False)


def encoded_again(patch: pytest.MonkeyPatch) -> None:
    """An order to encode that comes again makes complete parity invalid."""
    patch.setattr(ShardSlots, "encoding_begun", lambda self, snapshot: False)
