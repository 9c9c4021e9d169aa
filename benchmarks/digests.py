#!/usr/bin/env python3
"""Digest functions against memcpy, block by block as an arena uses them; a Markdown table.

benchmarks/digests.py [--mib 256] [--rounds 5] [--block-kib 64]

Ratios are of one run: each round times memcpy and every function in turn over the same
buffer, larger than the caches, and the median of the rounds' ratios counts.  Below 1 is
slower than memcpy.  A function that is not installed is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from megatron_ft.arena.digest import digest_blocks
from megatron_ft.core import isal

Digest = Callable[[Any], object]
OURS = "CRC-64, ISA-L, as arenas use it"


def functions() -> dict[str, tuple[int, Digest]]:
    """Bits and function of each candidate that runs here."""
    found: dict[str, tuple[int, Digest]] = {}
    found["CRC-64, ISA-L, a call a block"] = (64, isal.crc64)
    found["CRC-32, zlib"] = (32, zlib.crc32)
    found["Adler-32, zlib"] = (32, zlib.adler32)
    found["BLAKE2b-8, hashlib"] = (
        64,
        lambda block: hashlib.blake2b(block, digest_size=8).digest(),
    )
    found["SHA-256, hashlib"] = (256, lambda block: hashlib.sha256(block).digest())
    for name, bits in (("xxh64", 64), ("xxh3_64", 64)):
        try:
            module = import_module("xxhash")
        except ImportError:
            break
        found[f"{name}, xxhash"] = (bits, getattr(module, f"{name}_intdigest"))
    return found


def seconds(work: Callable[[], object]) -> float:
    """The clock's time for one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def over_blocks(digest: Digest, buffer: Any, size: int) -> None:
    """Digest a buffer block by block."""
    for at in range(0, buffer.nbytes, size):
        digest(buffer[at : at + size])


def measure(mib: int, rounds: int, block: int) -> tuple[float, Mapping[str, tuple[float, float]]]:
    """Median memcpy in GiB/s; by function: median GiB/s and median ratio to memcpy."""
    source = np.random.default_rng(1).integers(0, 256, mib << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    copies: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in functions()}
    for _ in range(rounds):
        copies.append(seconds(lambda: np.copyto(target, source)))
        for name, (_bits, digest) in functions().items():
            times[name].append(seconds(lambda d=digest: over_blocks(d, source, block)))  # type: ignore[misc]
        table = np.zeros(source.nbytes // block, np.uint64)
        times.setdefault(OURS, []).append(
            seconds(lambda t=table: digest_blocks(source, block, t))  # type: ignore[misc]
        )
    size = mib / 1024
    rates = {
        name: (
            size / statistics.median(taken),
            statistics.median(copy / own for copy, own in zip(copies, taken, strict=True)),
        )
        for name, taken in times.items()
    }
    return size / statistics.median(copies), rates


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, default=64)
    options = parser.parse_args()
    copy, rates = measure(options.mib, options.rounds, options.block_kib << 10)
    print("| function | bits | GiB/s | x memcpy |\n| --- | ---: | ---: | ---: |")
    print(f"| memcpy, numpy | | {copy:.2f} | 1.00 |")
    bits = {OURS: 64, **{name: width for name, (width, _) in functions().items()}}
    for name, (rate, ratio) in sorted(rates.items(), key=lambda item: -item[1][1]):
        print(f"| {name} | {bits[name]} | {rate:.2f} | {ratio:.2f} |")
    print(
        f"\nblocks of {options.block_kib} KiB in {options.mib} MiB, median of {options.rounds} "
        f"rounds, one thread; {platform.machine()}, Python {platform.python_version()}, "
        f"ISA-L {isal.load().path}"
    )


if __name__ == "__main__":
    main()
