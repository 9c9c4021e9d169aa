"""Capture into an arena and restore out of it, against a plain copy of the same bytes.

The parts that a trainer uses are used directly, so nothing but them is timed: no
supervisor runs and no other rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import restores
from benchmarks.capturing import MEBI, Capturing, capturing, plain_copy, tensors
from benchmarks.rounds import ratios, seconds
from benchmarks.table import Row
from megatron_ft.trainer.binding import region_tensor
from megatron_ft.trainer.copier import Bytes, ranges
from megatron_ft.trainer.cuda import CudaCopier

TURNS = 3
"""Turns of a round here: each takes a fifth of a second, and for that long, now and then, a shared
machine copies at half its speed."""

MANY = 2000

LARGER = 4
"""Restores are measured with so many times the bytes too: a part of each is for the number of
tensors, whatever their size."""


def parts(mib: int, rounds: int, device: str, arenas: Path) -> Iterator[Iterator[Row]]:
    """Page locking for a device; capture and restore, for few large and for many small tensors."""
    if device != "cpu":
        yield _registration(mib, rounds)
    for count, words in ((16, "16 tensors"), (MANY, "2,000 tensors")):
        rows = _rows(mib, rounds * TURNS, device, arenas, count, f"{words}, {mib} MiB")
        yield _in_one_thread(rows)
    if device == "cpu":
        yield _in_one_thread(_larger(LARGER * mib, rounds * TURNS, arenas))


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
        copier = CudaCopier(torch.cuda.current_device(), piece_bytes=MEBI)

        def lock(copier: CudaCopier = copier, region: Bytes = region) -> None:
            for start, stop in ranges(region.ctypes.data, region.nbytes):
                copier.attach(region[start:stop])

        samples.append(mib / 1024 / seconds(lock))
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
        limit = 0.95 if count < MANY else 0.85
        yield Row(f"capture, {words}", samples, "x copy", limit, note=_unlocked(captures, device))
        samples = ratios(rounds, copy, lambda: _sealed(captures))
        yield Row(f"capture with digests, {words}", samples, "x copy", note="until sealed")
        restores.require_right(captures)
        limit = 0.9 if count < MANY else 0.75
        yield from restores.into_warm_memory(rounds, device, words, captures, copy, limit)
        if device == "cpu":
            yield restores.into_new_memory(mib, rounds, words, captures)


def _larger(mib: int, rounds: int, arenas: Path) -> Iterator[Row]:
    """Restores alone, of tensors that are closer in size to those of a real shard."""
    with capturing(tensors(MANY, mib, "cpu"), arenas) as captures:
        captures.once()
        restores.require_right(captures)
        words = f"2,000 tensors, {mib} MiB"
        copy = plain_copy(mib, "cpu")
        yield from restores.into_warm_memory(rounds, "cpu", words, captures, copy, 0.9)


def _unlocked(captures: Capturing, device: str) -> str:
    """What is to be said of figures of a device whose copies go through memory of the driver."""
    locked = region_tensor(captures.engine.arena.data(0, writable=True)).is_pinned()
    return "" if device == "cpu" or locked else "the arena's pages are not locked"


def _sealed(captures: Capturing) -> float:
    started = time.perf_counter()
    captures.once()
    return time.perf_counter() - started
