"""Rates of the parts of a restore to a GPU and of a sealed capture, against a pinned copy.

    python -m benchmarks.device.datapath --arenas FOLDER [--mib 4096] [--markdown FILE]

Bytes lie in a file on a tmpfs, as in an arena.  A restore copies them to the device in three ways:
from memory that is not page-locked, by threads that each take the CRC-64 of a piece and pass it
through page-locked buffers of their own, and from memory that was page-locked before.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_ft.core import isal

MIB = 1 << 20
PIECE = 8 * MIB
BLOCK = 512 << 10
BUFFERS = 2
"""Page-locked buffers of a thread: one is filled while the other is copied."""

THREADS = (1, 2, 4, 8, 12, 16)
ROUNDS = 5
PORTABLE = 1

Bytes = npt.NDArray[np.uint8]
CUDA: Any = torch.cuda


@contextmanager
def region(folder: Path, mib: int) -> Iterator[Bytes]:
    """Random bytes in a file on a tmpfs."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, mib * MIB)
        mapped = mmap.mmap(file.fileno(), mib * MIB)
        view = np.frombuffer(mapped, np.uint8)
        words = view.view(np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 1 << 62, words.size, np.uint64)
        yield view


def seconds(work: Callable[[], object]) -> float:
    """The median time of some calls, the device's work included, after one that warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def in_threads(threads: int, pieces: range, work: Callable[[int, Iterator[int]], object]) -> None:
    """Call ``work`` in so many threads, with an iterator that they share."""
    left = iter(pieces)
    with ThreadPoolExecutor(threads) as pool:
        for one in [pool.submit(work, number, left) for number in range(threads)]:
            one.result()


class Restores:
    """The ways from ``source`` to ``target``, a tensor on the device of as many bytes."""

    def __init__(self, source: Bytes, target: torch.Tensor) -> None:
        self._source, self._target = source, target
        self._host = torch.from_numpy(source)
        self._pieces = range(0, source.nbytes, PIECE)
        self._library = isal.load()
        self._streams = [CUDA.Stream() for _ in range(max(THREADS))]
        self._buffers = [
            [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
            for _ in range(max(THREADS))
        ]

    def direct(self, threads: int) -> None:
        """Copies from the file's memory as it is."""

        def work(number: int, left: Iterator[int]) -> None:
            with torch.cuda.stream(self._streams[number]):
                for at in left:
                    part = slice(at, at + PIECE)
                    self._target[part].copy_(self._host[part], non_blocking=True)
            self._streams[number].synchronize()

        in_threads(threads, self._pieces, work)

    def digests(self, threads: int) -> None:
        """The CRCs of all blocks, and nothing else."""

        def work(number: int, left: Iterator[int]) -> None:
            found = np.empty(PIECE // BLOCK, np.uint64)
            for at in left:
                self._library.crc64_blocks(self._source[at : at + PIECE], BLOCK, found)

        in_threads(threads, self._pieces, work)

    def bounced(self, threads: int) -> None:
        """CRC of a piece, a copy into a page-locked buffer, a copy on a side stream."""

        def work(number: int, left: Iterator[int]) -> None:
            found = np.empty(PIECE // BLOCK, np.uint64)
            stream, buffers = self._streams[number], self._buffers[number]
            events: list[Any] = [None] * BUFFERS
            with torch.cuda.stream(stream):
                for turn, at in enumerate(left):
                    self._library.crc64_blocks(self._source[at : at + PIECE], BLOCK, found)
                    buffer = buffers[turn % BUFFERS]
                    if (event := events[turn % BUFFERS]) is not None:
                        event.synchronize()
                    buffer.copy_(self._host[at : at + PIECE])
                    self._target[at : at + PIECE].copy_(buffer, non_blocking=True)
                    events[turn % BUFFERS] = event = CUDA.Event()
                    event.record(stream)
            stream.synchronize()

        in_threads(threads, self._pieces, work)


def locking(source: Bytes, threads: int) -> tuple[float, float]:
    """Seconds to page-lock all of it in ranges of 64 MiB, and to unlock it."""
    cuda, size = CUDA.cudart(), 64 * MIB
    addresses = range(source.ctypes.data, source.ctypes.data + source.nbytes, size)

    def lock(_: int, left: Iterator[int]) -> None:
        for address in left:
            if int(cuda.cudaHostRegister(address, size, PORTABLE)):
                raise RuntimeError("memory cannot be page-locked; raise ulimit -l")

    def unlock(_: int, left: Iterator[int]) -> None:
        for address in left:
            cuda.cudaHostUnregister(address)

    began = time.perf_counter()
    in_threads(threads, addresses, lock)
    locked = time.perf_counter()
    in_threads(threads, addresses, unlock)
    return locked - began, time.perf_counter() - locked


def pinned_copies(target: torch.Tensor) -> tuple[float, float]:
    """Seconds of a copy from page-locked memory to the device, and back."""
    pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
    up = seconds(partial(target.copy_, pinned, non_blocking=True))
    return up, seconds(partial(pinned.copy_, target, non_blocking=True))


def measure(folder: Path, mib: int) -> Iterator[str]:
    """Lines of a table in Markdown."""
    gigabytes = mib * MIB / 1e9
    target = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
    up, down = pinned_copies(target)
    yield "| way | threads | GB/s | pinned copies |"
    yield "| --- | ---: | ---: | ---: |"
    yield f"| pinned, to the device | 1 | {gigabytes / up:.1f} | 1 |"
    yield f"| pinned, from the device | 1 | {gigabytes / down:.1f} | {down / up:.2f} |"
    with region(folder, mib) as source:
        ways = Restores(source, target)
        for name, way in (
            ("not page-locked", ways.direct),
            ("CRC-64 alone", ways.digests),
            ("CRC-64 and bounce buffers", ways.bounced),
        ):
            for threads in THREADS:
                took = seconds(partial(way, threads))
                yield f"| {name} | {threads} | {gigabytes / took:.1f} | {took / up:.2f} |"
        same = torch.equal(target.cpu(), torch.from_numpy(source))
        yield f"| the device has the file's bytes: {'yes' if same else '**no**'} | | | |"
        for threads in (1, 2, 4, 8):
            lock, unlock = locking(source, threads)
            yield f"| page locking | {threads} | {gigabytes / lock:.1f} | {lock / up:.2f} |"
            yield f"| unlocking | {threads} | {gigabytes / unlock:.1f} | {unlock / up:.2f} |"


def main() -> int:
    """Measure and print; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arenas", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"datapath: torch {torch.__version__} sees no GPU here", file=sys.stderr)
        return 2
    place = f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = [f"{place}, {os.cpu_count()} cores, {options.mib} MiB", ""]
    for line in measure(options.arenas, options.mib):
        lines.append(line)
        print(line, flush=True)
        if options.markdown:
            options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
