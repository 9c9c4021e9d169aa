"""Encode over MPI and over TCP on this machine; a Markdown table.

  python -m benchmarks.encode_transports --ranks 4 --parity 1 --mib 64

Every rank is a process of this machine with its own data.  Worlds of the transports take turns,
since other work on the machine comes and goes.  A rate is data protected a second and rank;
processor seconds are those of a rank and its data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from benchmarks.stripe.rank import Plan
from benchmarks.stripe.world import Measured, measure
from megatron_ft.erasure.world import MPI, TCP

WAYS = {
    "MPI, shared memory": (MPI, False),
    "MPI, TCP over lo": (MPI, True),
    "TCP with CURVE over lo": (TCP, False),
}


def row(name: str, rounds: list[Measured], first: list[Measured], size: int) -> str:
    """A line of the table: medians of all encodes, and of the rounds' ratios to the first row."""
    rate = size / statistics.median(s for found in rounds for s in found.seconds("encode"))
    pairs = zip(rounds, first, strict=True)
    ratio = statistics.median(_median(b) / _median(a) for a, b in pairs)
    cpu = statistics.median(s for found in rounds for s in found.cpu_seconds("encode"))
    return f"| {name} | {rate / 1e6:.0f} | {ratio:.2f} | {cpu / (size / 1e9):.2f} |"


def _median(found: Measured) -> float:
    return statistics.median(found.seconds("encode"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--mib", type=int, default=64, help="data of a rank (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="encodes of each world (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="worlds of each kind (%(default)s)")
    options = parser.parse_args()
    data, size = options.ranks - options.parity, options.mib << 20
    plan = Plan("rs", data, options.parity, size, ("encode",), options.runs)
    loads = [os.getloadavg()[0]]
    found: dict[str, list[Measured]] = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name, (transport, over_lo) in WAYS.items():
            found[name].append(measure(plan, transport, over_lo=over_lo))
            loads.append(os.getloadavg()[0])
    print(
        f"{time.strftime('%F')}, {os.cpu_count()} cores, load average {min(loads):.0f} to "
        f"{max(loads):.0f}; {options.ranks} ranks, rs:{data}+{options.parity}, {options.mib} "
        f"MiB each, {options.rounds} worlds of {options.runs} encodes\n"
    )
    print("| transport | MB/s a rank | to the first | processor s a GB |")
    print("| --- | ---: | ---: | ---: |")
    for name, rounds in found.items():
        print(row(name, rounds, next(iter(found.values())), size))


if __name__ == "__main__":
    main()
