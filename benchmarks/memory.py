"""Capture into an arena and restore out of it, against a plain copy of the same bytes.

The parts that a trainer uses are used directly, so nothing but them is timed: no
supervisor runs and no other rank.
"""

from __future__ import annotations

import mmap
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any

import torch

from benchmarks.rounds import ratios, seconds
from benchmarks.table import Row
from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import BLOCK_BYTES, ArenaHeader, Geometry, Permit
from megatron_ft.capture.binding import region_tensor, stored_view
from megatron_ft.capture.cuda import CudaCopier
from megatron_ft.capture.engine import CaptureEngine
from megatron_ft.capture.mapping import MappingState
from megatron_ft.capture.plan import plan_state
from megatron_ft.capture.preparation import choose_copier
from megatron_ft.capture.restore import SealedShard, restore_shard
from megatron_ft.capture.run import CaptureRun
from megatron_ft.capture.state import live_tensors
from megatron_ft.capture.threads import spare_threads
from megatron_ft.capture.ticket import Ticket
from megatron_ft.capture.values import same_bits
from megatron_ft.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.shard_meta import pack_meta

SHARD = "pp0-tp0-dp0-ep0"
MEBI = 1 << 20
SPLIT_NEVER = 1 << 62
SHARED_MEMORY = Path("/dev/shm")

TURNS = 3
"""Turns of a round here: each takes a fifth of a second, and for that long, now and then, a shared
machine copies at half its speed."""


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
        self.engine.begin(
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
    layout = plan_state(adapted, SPLIT_NEVER)
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
            choose_copier(adapted, 16 * MEBI),
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
        matrix=0,
        data_members=1,
        parity_members=0,
        member_index=0,
        members=(SHARD,),
        digest_algorithm=digest.default_algorithm(),
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


def parts(mib: int, rounds: int, device: str, arenas: Path) -> Iterator[Iterator[Row]]:
    """Page locking for a device; capture and restore, for few large and for many small tensors."""
    if device != "cpu":
        yield _registration(mib, rounds)
    for count, words in ((16, "16 tensors"), (2000, "2,000 tensors")):
        rows = _rows(mib, rounds * TURNS, device, arenas, count, f"{words}, {mib} MiB")
        yield _in_one_thread(rows)


def _in_one_thread(rows: Iterator[Row]) -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from rows
    finally:
        torch.set_num_threads(threads)


def _registration(mib: int, rounds: int) -> Iterator[Row]:
    """How fast an arena's pages are locked for the device, once at the start of a job."""
    samples = []
    for _ in range(rounds):
        # Not zeros: their pages would be made in the time that is measured.
        region = torch.ones(mib * MEBI, dtype=torch.uint8).numpy()
        copier = CudaCopier(MEBI, torch.cuda.current_device())
        samples.append(mib / 1024 / seconds(lambda c=copier, r=region: c.attach([r])))  # type: ignore[misc]
        locked = region_tensor(region).is_pinned()
        copier.detach()
        if not locked:
            raise RuntimeError("the device could not lock pages; the log says why")
    yield Row("page locking of an arena", tuple(samples), "GiB/s")


def _rows(
    mib: int, rounds: int, device: str, arenas: Path, count: int, words: str
) -> Iterator[Row]:
    state = tensors(count, mib, device)
    copy = plain_copy(mib, device)
    with capturing(state, arenas) as captures:
        samples = ratios(rounds, copy, lambda: captures.once().copy_seconds)
        yield Row(f"capture, {words}", samples, "x copy", 0.95, note=_unlocked(captures, device))
        samples = ratios(rounds, copy, lambda: _sealed(captures))
        yield Row(f"capture with digests, {words}", samples, "x copy", note="until sealed")
        _require_right(captures)
        yield from _restores(mib, rounds, device, words, captures, copy)


def _unlocked(captures: Capturing, device: str) -> str:
    """What is to be said of figures of a device whose copies go through memory of the driver."""
    locked = region_tensor(captures.engine.arena.data(0, writable=True)).is_pinned()
    return "" if device == "cpu" or locked else "the arena's pages are not locked"


def _require_right(captures: Capturing) -> None:
    """RuntimeError unless what was captured, and what is restored of it, is the state bit by bit.

    Figures of copies that bring other bytes are none.
    """
    live = live_tensors(captures.state)
    _require_same(captures, live)
    for tensor in live.values():
        tensor.zero_()
    _restored(captures, live)
    _require_same(captures, live)


def _require_same(captures: Capturing, live: dict[str, torch.Tensor]) -> None:
    region = region_tensor(captures.engine.arena.data(0))
    for entry in captures.engine.binding.layout.entries:
        if not same_bits(stored_view(region, entry), live[entry.name].cpu()):
            raise RuntimeError(f"{entry.name} was not copied as it is")


def _restores(
    mib: int,
    rounds: int,
    device: str,
    words: str,
    captures: Capturing,
    copy: Callable[[], object],
) -> Iterator[Row]:
    """Into tensors that were used before, and into memory that nobody has touched yet.

    As in a restarted trainer: the arena is mapped anew, so its pages are faulted in; or that and
    all that depends on the arena alone was done while the model was built, as under Megatron,
    which the second row leaves out of the time.
    The first is of models, which training scripts fill with first values; the second of what
    exists only after a restore, such as the moments of an optimizer.  The copy that each is
    compared with is into the same kind of memory, but out of memory that is mapped.
    """
    live = live_tensors(captures.state)
    limit = 0.9 if device == "cpu" else None
    samples = ratios(rounds, copy, lambda: _restored(captures, live))
    threads = f"{spare_threads()} threads"
    note = f"verified as it is copied; arena mapped anew, tensors warm, {threads}"
    yield Row(f"restore, {words}", samples, "x copy", limit, note=note)
    samples = ratios(rounds, copy, lambda: _restored(captures, live, expected=True))
    note = f"as above, arena mapped and its layout read while the model is built, {threads}"
    yield Row(f"restore that was expected, {words}", samples, "x copy", limit, note=note)
    if device == "cpu":
        source = torch.rand(mib * MEBI // 4)
        samples = ratios(
            rounds,
            lambda: new_tensors([source.numel()])[0].copy_(source),
            lambda: _restored(captures, _in_new_memory(live)),
        )
        note = "arena mapped anew; tensors in new memory, and so is the copy"
        yield Row(f"restore into new memory, {words}", samples, "x copy", limit, note=note)


def _in_new_memory(live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(live, new_tensors([one.numel() for one in live.values()]), strict=True))


def new_tensors(sizes: list[int]) -> list[torch.Tensor]:
    """float32 tensors in one mapping whose pages do not exist before somebody writes to them."""
    memory = torch.frombuffer(mmap.mmap(-1, 4 * sum(sizes)), dtype=torch.float32)
    ends = accumulate(sizes)
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _sealed(captures: Capturing) -> float:
    started = time.perf_counter()
    captures.once()
    return time.perf_counter() - started


def _restored(captures: Capturing, state: dict[str, torch.Tensor], expected: bool = False) -> float:
    """Seconds of one restore from the slot that was captured last.

    ``expected``: without what ``expect_load()`` does of it, in a thread, while a model is built.
    """
    record = captures.record
    assert record is not None
    adapted = MappingState(state)
    started = time.perf_counter()
    arena = Arena.open(captures.engine.arena.path)
    shard = SealedShard(arena, 0, record, lambda blocks: None)
    if expected:
        shard.prepare()
        shard.map_pages()
        started = time.perf_counter()
    restore_shard(shard, adapted, SPLIT_NEVER)
    del shard
    closing = arena.close_beside()
    if next(iter(state.values())).is_cuda:
        torch.cuda.synchronize()
    ended = time.perf_counter()
    closing.join()
    return ended - started
