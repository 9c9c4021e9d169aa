"""An in-test SMP: real arenas, permits written by hand, everything reported kept in lists."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import ArenaHeader, Geometry, Permit, SlotState
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import Ancestor, RankRule, SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import RestoreOffer
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.manager import SnapshotManager

WAIT = 20.0
BLOCK = 4096


@dataclass
class FakeSmp:
    """Stands for TrainerClient on one arena file; outlives managers, as the SMP does."""

    directory: Path
    shard_id: str = "pp0-tp0-dp0-ep0"
    offer: RestoreOffer | None = None
    on_outcome: Callable[[SnapshotId, str], None] | None = None
    arena: Arena | None = None
    sealed_records: dict[SnapshotId, SealedRecord] = field(default_factory=dict)
    replicas: dict[SnapshotId, tuple[m.ReplicaDigests, ...]] = field(default_factory=dict)
    missed_ids: list[SnapshotId] = field(default_factory=list)
    unfit_errors: list[Exception] = field(default_factory=list)
    abandoned_ids: dict[SnapshotId, str] = field(default_factory=dict)
    restored_calls: list[SnapshotId] = field(default_factory=list)
    declines: list[tuple[SnapshotId, str, int]] = field(default_factory=list)
    corrupt_calls: list[tuple[SnapshotId, int]] = field(default_factory=list)
    costs: list[tuple[SnapshotId, float, float, int]] = field(default_factory=list)
    endings: list[tuple[int, bool]] = field(default_factory=list)
    slots: dict[SnapshotId, int] = field(default_factory=dict)
    begun: list[SnapshotId] = field(default_factory=list)
    gives: bool = True
    required: int = 0
    outgrown: list[int] = field(default_factory=list)
    unattached: list[str] = field(default_factory=list)
    attached: Event = field(default_factory=Event)
    on_arena: Callable[[Path], None] | None = None
    sequence: int = 0
    ended: Event = field(default_factory=Event)
    block_bytes: int = BLOCK

    @property
    def path(self) -> Path:
        return self.directory / f"{self.shard_id}.arena"

    def hello(self, shard_id: str, coordinates: tuple[int, ...]) -> RestoreOffer | None:
        assert shard_id == self.shard_id
        return self.offer

    def prepare(
        self,
        required_bytes: int,
        interval: int,
        timeout: float = 0.0,
        rank_rule: RankRule | None = None,
    ) -> m.Prepared:
        """Make the arena, or keep the one that is there."""
        self.required = required_bytes
        if self.arena is None:
            self.arena = self._make(required_bytes)
        return m.Prepared(str(self.path))

    def renew(self) -> Path:
        """Make the arena that was asked for beside the present one, and tell the trainer of it.

        Returns the path of the older one.
        """
        assert self.arena is not None and self.on_arena is not None
        older, self.arena.path = self.arena, self.path.replace(self.path.with_suffix(".source"))
        self.arena = self._make(self.outgrown[-1])
        self.attached.clear()
        self.on_arena(self.path)
        return older.path

    def _make(self, required_bytes: int) -> Arena:
        geometry = Geometry.for_stripe(
            slot_count=2,
            required_bytes=required_bytes,
            data_members=1,
            parity_members=0,
            block_bytes=self.block_bytes,
        )
        header = ArenaHeader(
            job=uuid.uuid4(),
            shard_id=self.shard_id,
            incarnation=1,
            lineage=(Ancestor(1, None),),
            codec="none",
            data_members=1,
            parity_members=0,
            member_index=0,
            members=(self.shard_id,),
            geometry=geometry,
        )
        return Arena.create(self.path, header)

    def node_folder(self) -> Path:
        return self.directory

    def grant(self, iteration: int, slot: int = 0, stay: float = 0.0) -> SnapshotId:
        """Permit the next snapshot at ``iteration``."""
        assert self.arena is not None
        self.sequence += 1
        snapshot = SnapshotId(1, self.sequence)
        self.slots[snapshot] = slot
        self.ended.clear()
        self.arena.write_permit(Permit(snapshot, iteration, slot, False, stay))
        return snapshot

    def revoke(self) -> None:
        assert self.arena is not None
        permit = self.arena.permit()
        assert permit is not None
        self.arena.write_permit(Permit(permit.snapshot, permit.iteration, permit.slot, True))

    def send(self, message: m.Message) -> None:
        if isinstance(message, m.Begins):
            self.begins(message.snapshot, message.iteration, message.slot)
        elif isinstance(message, m.Sealed):
            self.replicas[message.record.snapshot] = message.replicas
            self.sealed(message.record.snapshot, message.record)
        elif isinstance(message, m.Abandoned):
            self.abandoned(message.snapshot, message.reason)
        elif isinstance(message, m.Missed):
            self.missed_ids.append(message.snapshot)
        elif isinstance(message, m.Unfit):
            self.unfit_errors.append(message.error)
        elif isinstance(message, m.Declined):
            self.declines.append((message.snapshot, message.reason, message.iteration))
        elif isinstance(message, m.CorruptShard):
            self.corrupt_calls.append((message.snapshot, message.blocks))
        elif isinstance(message, m.Outgrown):
            self.outgrown.append(message.required_bytes)
        elif isinstance(message, m.Attached):
            self.attached.set()
        elif isinstance(message, m.Unattached):
            self.unattached.append(message.reason)
        elif isinstance(message, m.CaptureCost):
            seconds = message.stall_seconds, message.copy_seconds
            self.costs.append((message.snapshot, *seconds, message.copied_bytes))

    def begins(self, snapshot: SnapshotId, iteration: int, slot: int) -> None:
        """Give the slot at once, unless the test keeps it."""
        self.begun.append(snapshot)
        assert self.arena is not None
        if self.gives:
            header = replace(EMPTY_SLOT, state=SlotState.CAPTURING, snapshot=snapshot)
            self.arena.write_slot(slot, replace(header, iteration=iteration))

    def sealed(self, snapshot: SnapshotId, record: SealedRecord) -> None:
        self.sealed_records[snapshot] = record
        self.ended.set()

    def abandoned(self, snapshot: SnapshotId, reason: str) -> None:
        assert snapshot not in self.abandoned_ids
        self.abandoned_ids[snapshot] = reason
        self.ended.set()

    def restored(self, snapshot: SnapshotId) -> None:
        self.restored_calls.append(snapshot)

    def ending(self, iteration: int, finished: bool) -> None:
        self.endings.append((iteration, finished))

    def close(self) -> None:
        """A trainer left; the arena stays."""

    def wait_ended(self) -> None:
        assert self.ended.wait(WAIT), "the capture neither sealed nor was abandoned"

    def offer_last(self) -> None:
        snapshot = max(self.sealed_records)
        record = self.sealed_records[snapshot]
        self.offer = RestoreOffer(self.path, self.slots[snapshot], record, "memory")


class GatedCopier(CpuCopier):
    """A copier that waits, before each piece, until the test lets it continue."""

    def __init__(self, piece_bytes: int = 1 << 20) -> None:
        super().__init__(piece_bytes)
        self.started = Event()
        self.gate = Event()

    def copy(self, *arguments: Any) -> bool:
        """Copy the first item's first piece when the gate is open."""
        self.started.set()
        assert self.gate.wait(WAIT)
        return super().copy(*arguments)


def make_manager(smp: FakeSmp, **options: Any) -> SnapshotManager:
    settings = {"fence_timeout_seconds": WAIT, **options.pop("settings", {})}
    options.setdefault("copier", CpuCopier(65536))
    return SnapshotManager(
        SnapshotConfig(**settings),
        client=smp,  # type: ignore[arg-type]
        rank=0,
        **options,
    )


def saved(smp: FakeSmp, state: Any, slot: int = 0) -> SealedRecord:
    """What a state was sealed as by a trainer that has ended; the next one is offered it."""
    manager = make_manager(smp)
    manager.prepare(state)
    snapshot = smp.grant(1, slot)
    manager.save(1, state)
    smp.wait_ended()
    manager.close()
    smp.offer_last()
    return smp.sealed_records[snapshot]


def gated(smp: FakeSmp, state: Any, **settings: object) -> tuple[SnapshotManager, GatedCopier]:
    """A prepared trainer that has been through its fence, and whose copies wait at a gate."""
    copier = GatedCopier()
    manager = make_manager(smp, copier=copier, settings=settings)
    with manager.fence():
        pass
    manager.prepare(state)
    return manager, copier


def bits(tensor: torch.Tensor) -> bytes:
    """The exact bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def capture(smp: FakeSmp, manager: Any, state: Any, iteration: int = 1, slot: int = 0) -> Any:
    """One complete capture."""
    if smp.arena is None:
        manager.prepare(state)
    smp.grant(iteration, slot)
    ticket = manager.save(iteration, state)
    smp.wait_ended()
    wait_finished(manager)
    return ticket


def wait_finished(manager: Any) -> None:
    """Wait until the copy thread has let go of its capture: the SMP hears of its end before."""
    run = manager._captures._run
    assert run is None or run.finished.wait(WAIT), f"no end of a capture in {WAIT:g} s"
