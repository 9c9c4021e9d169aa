"""Flip random bits of real arenas and print what became of them.

python -m tests.support.bit_flips --flips 1000000
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from tests.support.bit_flips.run import flip, merge, table


def main() -> int:
    """Exit code 1 if a flip was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.bit_flips")
    parser.add_argument("--flips", type=int, default=1_000_000, help="bits (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--protect", default="rs:2+2", help="scheme (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="%(default)s")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="%(default)s")
    options = parser.parse_args()
    share, started = -(-options.flips // options.processes), time.monotonic()
    seeds = [options.seed * 1000 + number for number in range(options.processes)]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        parts = list(
            pool.map(flip, repeat(options.protect), repeat(share), seeds, repeat(options.folder))
        )
    counts = merge(parts)
    print(table(counts))
    print(f"\n{options.protect}, seed {options.seed}, {time.monotonic() - started:.0f} s")
    return int(any(count.missed for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
