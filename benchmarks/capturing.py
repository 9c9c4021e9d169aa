"""One engine on an arena of its own, to be measured with nothing else of a trainer around it."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import BLOCK_BYTES, ArenaHeader, Geometry, Permit, SlotState
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.core.shard import pack_meta
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.trainer.capture_run import CaptureRun
from megatron_ft.trainer.engine import CaptureEngine, choose_copier
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state
from megatron_ft.trainer.state import live_tensors
from megatron_ft.trainer.ticket import Ticket

SHARD = "pp0-tp0-dp0-ep0"
MEBI = 1 << 20
SHARED_MEMORY = Path("/dev/shm")


def tensors(count: int, mib: int, device: str) -> dict[str, Any]:
    """``count`` float32 tensors of ``mib`` MiB together."""
    numel = mib * MEBI // 4 // count
    return {f"w{i}": torch.rand(numel, device=device) for i in range(count)}


@dataclass
class Capturing:
    """One engine on an arena of its own; ``once`` takes one snapshot from begin to sealed."""

    state: MappingState
    engine: CaptureEngine
    meta: bytes
    ended: Event = field(default_factory=Event)
    record: SealedRecord | None = None
    run: CaptureRun | None = None
    sequence: int = 0

    def give(self, snapshot: SnapshotId, iteration: int, slot: int) -> None:
        """As the SMP does when a capture begins."""
        header = replace(EMPTY_SLOT, state=SlotState.CAPTURING, snapshot=snapshot)
        self.engine.arena.write_slot(slot, replace(header, iteration=iteration))

    def on_sealed(self, run: CaptureRun, record: SealedRecord) -> None:
        """Keep what was sealed."""
        self.run, self.record = run, record
        self.ended.set()

    def once(self) -> CaptureRun:
        """Capture into slot 0; returns the run with its figures."""
        self.sequence += 1
        snapshot = SnapshotId(1, self.sequence)
        permit = Permit(snapshot, self.sequence, 0, False)
        self.engine.arena.write_permit(permit)
        self.ended.clear()
        self.engine.start(
            permit,
            Ticket(self.sequence, snapshot),
            live_tensors(self.state),
            lambda: self.meta,
            time.monotonic(),
        )
        assert self.ended.wait(120), "the capture neither sealed nor was abandoned in 120 s"
        assert self.run is not None
        return self.run


@contextmanager
def capturing(state: dict[str, Any], arenas: Path = SHARED_MEMORY) -> Iterator[Capturing]:
    """An engine for ``state`` with an arena below ``arenas``, removed at the end."""
    adapted = MappingState(state)
    layout = plan_state(adapted)
    meta = pack_meta(layout.to_bytes(), adapted.objects(), b"")
    room = digest.required_bytes(layout.tensor_bytes, len(meta), BLOCK_BYTES)
    with tempfile.TemporaryDirectory(dir=arenas, prefix="megatron-ft-benchmark-") as folder:
        path = Path(folder) / f"{SHARD}.arena"
        Arena.create(path, _header(room)).close()
        holder: list[Capturing] = []
        engine = CaptureEngine(
            path,
            SHARD,
            layout,
            choose_copier(adapted),
            lambda *promise: holder[0].give(*promise),
            lambda run, record: holder[0].on_sealed(run, record),
            lambda run, reason: _fail(reason),
        )
        holder.append(Capturing(adapted, engine, meta))
        try:
            yield holder[0]
        finally:
            engine.close(60)


def _fail(reason: str) -> None:
    raise RuntimeError(f"the capture was abandoned: {reason}")


def _header(required: int) -> ArenaHeader:
    return ArenaHeader(
        job=uuid.uuid4(),
        shard_id=SHARD,
        incarnation=1,
        lineage=(Ancestor(1, None),),
        codec="none",
        data_members=1,
        parity_members=0,
        member_index=0,
        members=(SHARD,),
        geometry=Geometry.for_stripe(
            slot_count=2,
            required_bytes=required,
            data_members=1,
            parity_members=0,
            block_bytes=BLOCK_BYTES,
        ),
    )


def plain_copy(mib: int, device: str) -> Callable[[], object]:
    """One copy of as many bytes into warm memory; from a device, into pinned memory."""
    source = torch.rand(mib * MEBI // 4, device=device)
    target = torch.empty(source.shape, pin_memory=device != "cpu")
    target.zero_()

    def copy() -> None:
        target.copy_(source, non_blocking=device != "cpu")
        if device != "cpu":
            torch.cuda.synchronize()

    return copy
