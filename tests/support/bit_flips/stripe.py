"""One protected stripe in real arena files, and the bytes that they had."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.arena.format import (
    ArenaHeader,
    Geometry,
    Permit,
    SlotHeader,
    SlotState,
)
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.member import (
    MemberView,
    StripeCode,
    code_of,
    member_of,
    parity_digests_of,
    parity_root,
    piece_of,
)

BLOCK_BYTES = 1024
SLOT = 0
SNAPSHOT = SnapshotId(1, 1)
ITERATION = 10
PERMIT = Permit(SNAPSHOT, ITERATION, SLOT)


class Stripe:
    """Arenas of all members in ``folder``, one committed protected snapshot in each.

    ``raw`` are the files as bytes that can be changed, ``whole`` what they should be.
    """

    def __init__(self, folder: Path, scheme: Scheme, seed: int, tensor_bytes: int = 11_000) -> None:
        self._dice = np.random.default_rng(seed)
        self.scheme = scheme
        self.shards = tuple(f"shard{number}" for number in range(scheme.members))
        self.paths = [folder / f"{shard}.arena" for shard in self.shards]
        self.arenas = [
            Arena.create(path, self._header(number, tensor_bytes))
            for number, path in enumerate(self.paths)
        ]
        self.headers = [arena.header for arena in self.arenas]
        self.code = code_of(self.headers[0])
        records = [self._seal(n, tensor_bytes - 700 * n) for n in range(scheme.members)]
        self._protect(records)
        self.slots = [[a.slot(i) for i in range(a.geometry.slot_count)] for a in self.arenas]
        self.raw: list[NDArray[np.uint8]] = [np.memmap(p, np.uint8, "r+") for p in self.paths]
        self.whole = [raw.copy() for raw in self.raw]

    @property
    def geometry(self) -> Geometry:
        """Sizes and offsets, the same in all arenas."""
        return self.headers[0].geometry

    def view(self, member: int) -> MemberView:
        """The member's slot, writable, as its header says it is."""
        header = self.slots[member][SLOT]
        return member_of(self.arenas[member], SLOT, header, data=True, parity=True)

    def remember_control(self, member: int) -> None:
        """Headers were written anew, with higher versions: that is how they should be now."""
        control = slice(0, self.geometry.control_bytes)
        self.whole[member][control] = self.raw[member][control]

    def close(self) -> None:
        """Unmap everything; the files stay."""
        self.raw.clear()
        for arena in self.arenas:
            arena.close()

    def _header(self, number: int, tensor_bytes: int) -> ArenaHeader:
        k, m = self.scheme.data_members, self.scheme.parity_members
        geometry = Geometry.for_stripe(
            slot_count=2,
            required_bytes=required_bytes(tensor_bytes, 100, BLOCK_BYTES),
            data_members=k,
            parity_members=m,
            block_bytes=BLOCK_BYTES,
        )
        return ArenaHeader(
            job=uuid.UUID(int=1),
            shard_id=self.shards[number],
            incarnation=1,
            lineage=(Ancestor(1, None),),
            codec=self.scheme.kind,
            data_members=k,
            parity_members=m,
            member_index=number,
            members=self.shards,
            geometry=geometry,
        )

    def _seal(self, number: int, tensor_bytes: int) -> SealedRecord:
        arena = self.arenas[number]
        data = arena.data(SLOT, writable=True)
        data[:tensor_bytes] = self._dice.integers(0, 256, tensor_bytes, np.uint8)
        arena.write_permit(PERMIT)
        arena.write_progress(ITERATION)
        return seal(
            data,
            shard_id=self.shards[number],
            snapshot=SNAPSHOT,
            iteration=ITERATION,
            tensor_bytes=tensor_bytes,
            meta=b"small objects",
            layout_hash=bytes(32),
            block_bytes=BLOCK_BYTES,
        )

    def _protect(self, records: list[SealedRecord]) -> None:
        """Parity of every row, its digests, and headers that say so."""
        table = tuple(records)
        sealed = SlotHeader(SlotState.COMMITTED, SNAPSHOT, ITERATION, stripe_table=table)
        headers = [replace(sealed, record=record) for record in records]
        views = [
            member_of(arena, SLOT, header, data=True, parity=True)
            for arena, header in zip(self.arenas, headers, strict=True)
        ]
        code_rows(self.code, views)
        for arena, header, view in zip(self.arenas, headers, views, strict=True):
            view.parity_digests[:] = parity_digests_of(self.code, view.parity)
            root = parity_root(view.parity_digests)
            arena.write_slot(SLOT, replace(header, parity_valid=True, parity_root=root))


def code_rows(code: StripeCode, views: list[MemberView]) -> None:
    """Compute the parity of every row of a stripe whose data is sealed, in this process."""
    kernel, whole = code.codec().encode_kernel(), slice(0, code.chunk_bytes)
    for row in range(code.members):
        holders = [code.layout.holder(row, symbol) for symbol in range(code.members)]
        pieces = [piece_of(code, views[n], n, row, whole) for n in holders]
        kernel(pieces[: code.data_members], pieces[code.data_members :])
