"""Small jobs for the tests of disk/: arenas of some nodes with committed snapshots in them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.arena.format import (
    ArenaHeader,
    Geometry,
    SlotHeader,
    SlotState,
)
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.core.shard import ShardLayout, TensorSpec, pack_meta, plan_layout

JOB = uuid.UUID(int=7)
BLOCK = 1024
SHARDS = ("dp0", "dp1")


def layout(width: int = 100) -> ShardLayout:
    """An odd-sized layout: gaps, an alias, a part of a split tensor, an empty one, odd dtypes."""
    return plan_layout(
        [
            TensorSpec("weight", "float32", 4, (width, 3), address=4096),
            TensorSpec("tied", "float32", 4, (10,), address=4100),
            TensorSpec("half", "bfloat16", 2, (7,)),
            TensorSpec("part", "int64", 8, (11,), split=(1, 2)),
            TensorSpec("empty", "float64", 8, (0, 4)),
            TensorSpec("flag", "bool", 1, ()),
            TensorSpec("spectrum", "complex128", 16, (2,)),
        ]
    )


def content(shard_id: str, snapshot: SnapshotId, size: int) -> np.ndarray:
    seed = [*shard_id.encode(), *snapshot]
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Memory:
    """The arenas of a job: shard i on node i, as SMPs would have left them."""

    def __init__(
        self,
        root: Path,
        job: str = "job",
        shards: Sequence[str] = SHARDS,
        slots: int = 2,
        width: int = 100,
        block_bytes: int = BLOCK,
        parity: int = 0,
    ) -> None:
        self.root, self.job, self.shards = root, job, tuple(shards)
        self.layout, self.parity = layout(width), parity
        room = required_bytes(self.layout.tensor_bytes, 4096, BLOCK)
        self.geometry = Geometry.for_stripe(
            slot_count=slots,
            required_bytes=room,
            data_members=len(shards) - parity,
            parity_members=parity,
            block_bytes=block_bytes,
        )
        for index, shard_id in enumerate(self.shards):
            Arena.create(self.path(shard_id), self._header(index)).close()

    def folder(self, shard_id: str) -> Path:
        return self.root / self.job / f"n{self.shards.index(shard_id)}"

    def path(self, shard_id: str) -> Path:
        return self.folder(shard_id) / f"{shard_id}.arena"

    def _header(self, index: int) -> ArenaHeader:
        return ArenaHeader(
            job=JOB,
            shard_id=self.shards[index],
            incarnation=1,
            lineage=(Ancestor(1, None),),
            codec="rs" if self.parity else "none",
            data_members=len(self.shards) - self.parity,
            parity_members=self.parity,
            member_index=index,
            members=self.shards,
            geometry=self.geometry,
        )

    def commit(self, sequence: int, iteration: int, *, slot: int | None = None) -> SnapshotId:
        snapshot = SnapshotId(1, sequence)
        for shard_id in self.shards:
            self.commit_one(shard_id, snapshot, iteration, slot=slot)
        return snapshot

    def commit_one(
        self,
        shard_id: str,
        snapshot: SnapshotId,
        iteration: int,
        *,
        slot: int | None = None,
        state: SlotState = SlotState.COMMITTED,
    ) -> SealedRecord:
        index = snapshot.sequence % 2 if slot is None else slot
        with Arena.open(self.path(shard_id)) as arena:
            data = arena.data(index, writable=True)
            size = self.layout.tensor_bytes
            for entry in self.layout.entries:
                if not entry.alias_of:
                    stored = content(shard_id + entry.name, snapshot, entry.nbytes)
                    data[entry.offset : entry.offset + entry.nbytes] = stored
            record = seal(
                data,
                shard_id=shard_id,
                snapshot=snapshot,
                iteration=iteration,
                tensor_bytes=size,
                meta=pack_meta(self.layout.to_bytes(), {"iteration": iteration}),
                layout_hash=self.layout.hash(),
                block_bytes=self.geometry.block_bytes,
            )
            del data
            header = SlotHeader(state, snapshot, iteration, True, record)
            arena.write_slot(index, header)
        return record

    def flip(self, shard_id: str, sequence: int, at: int = 0) -> None:
        with Arena.open(self.path(shard_id)) as arena:
            data = arena.data(sequence % 2, writable=True)
            data[at] ^= 1
            del data


def waiting(root: Path, sequence: int = 1, width: int = 100, block_bytes: int = BLOCK) -> Memory:
    """Arenas in which a slot waits for the snapshot; it holds an older, longer one's bytes."""
    memory = Memory(root, width=width, block_bytes=block_bytes)
    for shard in SHARDS:
        with Arena.open(memory.path(shard)) as arena:
            arena.data(1, writable=True)[:] = 0xFF
            snapshot = SnapshotId(1, sequence)
            arena.write_slot(1, SlotHeader(SlotState.REBUILDING, snapshot, 10 * sequence))
    return memory
