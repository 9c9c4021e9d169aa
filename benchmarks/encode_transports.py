#!/usr/bin/env python3
"""Encode over MPI and over TCP on this machine; a Markdown table.

  python benchmarks/encode_transports.py --ranks 4 --parity 1 --mib 64

Every rank is a process of this machine with its own data.  Worlds of the transports take turns,
since other work on the machine comes and goes.  A rate is data protected a second and rank;
processor seconds are those of a rank and its data.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.doctor.answer import answers, last_words, say
from megatron_ft.erasure.encode import encode
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.stripes import padded_bytes
from megatron_ft.erasure.transport import Link, barrier
from megatron_ft.erasure.world import MPI, TCP, join_world
from megatron_ft.identity import SnapshotId
from megatron_ft.launch.launcher import Placement
from megatron_ft.launch.virtual import VirtualCluster
from megatron_ft.launch.world_starter import WorldStarter

BLOCK_BYTES = 65536
WORLD_SECONDS = 600.0


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """One encode on one rank: seconds, and its processor seconds."""

    rank: int
    seconds: float
    cpu_seconds: float


def work(rank_count: int, parity: int, size: int, runs: int) -> None:
    """What one rank does."""
    world = join_world()
    rank = world.transport().rank
    needed = padded_bytes([required_bytes(size, 0, BLOCK_BYTES)], rank_count - parity, BLOCK_BYTES)
    code = StripeCode("rs", rank_count - parity, parity, needed, BLOCK_BYTES, 1)
    member = _member(code, rank, size)
    everyone = range(rank_count)
    for _ in range(runs + 1):
        barrier(Link(world.transport(), everyone, None))
        begin, used = time.perf_counter(), time.process_time()
        encode(code, member, world.transport(), everyone)
        say(Encoded(rank, time.perf_counter() - begin, time.process_time() - used))
    world.leave()


def _member(code: StripeCode, rank: int, size: int) -> MemberView:
    data = np.zeros(code.data_bytes, np.uint8)
    data[:size] = np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)
    record = seal(
        data, shard_id=f"s{rank}", snapshot=SnapshotId(1, 1), iteration=1, tensor_bytes=size,
        meta=b"", layout_hash=b"h" * 32, block_bytes=BLOCK_BYTES, algorithm=1,
    )  # fmt: skip
    parity, digests = np.zeros(code.parity_bytes, np.uint8), np.zeros(code.parity_blocks, np.uint64)
    return MemberView(data, parity, digests, record)


def measure(transport: str, arguments: argparse.Namespace, network: bool) -> list[Encoded]:
    """All encodes of one world but the first of each rank, which warms up."""
    names = [f"n{i}" for i in range(arguments.ranks)]
    cluster = VirtualCluster(f"bench-{uuid.uuid4().hex[:8]}", names)
    numbers = [arguments.ranks, arguments.parity, arguments.mib << 20, arguments.runs]
    argv = [sys.executable, __file__, "--rank", *map(str, numbers)]
    environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1"}
    if network:
        environment = {**environment, "OMPI_MCA_btl": "self,tcp"}
        environment = {**environment, "OMPI_MCA_btl_tcp_if_include": "lo"}
    with tempfile.TemporaryDirectory(prefix="mft-") as folder:
        log = Path(folder) / "log"
        try:
            placements = [Placement(name, argv, environment) for name in names]
            world = WorldStarter(cluster, transport).start(placements, log)
            status = asyncio.run(asyncio.wait_for(world.wait(), WORLD_SECONDS))
        finally:
            cluster.destroy()
        if status:
            raise SystemExit(f"the world over {transport} ended with {status}: {last_words(log)}")
        said = list(answers(log, Encoded))
    return [s for rank in range(arguments.ranks) for s in [e for e in said if e.rank == rank][1:]]


def row(name: str, rounds: list[list[Encoded]], first: list[list[Encoded]], size: int) -> str:
    """A line of the table: medians of all encodes, and of the rounds' ratios to the first row."""
    everything = [encoded for said in rounds for encoded in said]
    rate = size / _median(everything)
    ratio = statistics.median(_median(b) / _median(a) for a, b in zip(rounds, first, strict=True))
    cpu = statistics.median(e.cpu_seconds for e in everything) / (size / 1e9)
    return f"| {name} | {rate / 1e6:.0f} | {ratio:.2f} | {cpu:.2f} |"


def _median(said: list[Encoded]) -> float:
    return statistics.median(encoded.seconds for encoded in said)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--mib", type=int, default=64, help="data of a rank (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="encodes of each world (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="worlds of each kind (%(default)s)")
    arguments = parser.parse_args()
    ways = {
        "MPI, shared memory": (MPI, False),
        "MPI, TCP over lo": (MPI, True),
        "TCP with CURVE over lo": (TCP, False),
    }
    loads = [os.getloadavg()[0]]
    found: dict[str, list[list[Encoded]]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, (transport, network) in ways.items():
            found[name].append(measure(transport, arguments, network))
            loads.append(os.getloadavg()[0])
    data = arguments.ranks - arguments.parity
    print(
        f"{time.strftime('%F')}, {os.cpu_count()} cores, load average {min(loads):.0f} to "
        f"{max(loads):.0f}; {arguments.ranks} ranks, rs:{data}+{arguments.parity}, {arguments.mib} "
        f"MiB each, {arguments.rounds} worlds of {arguments.runs} encodes\n"
    )
    print("| transport | MB/s a rank | to the first | processor s a GB |")
    print("| --- | ---: | ---: | ---: |")
    for name, rounds in found.items():
        print(row(name, rounds, next(iter(found.values())), arguments.mib << 20))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(*map(int, sys.argv[2:]))
    else:
        main()
