"""Drains against a plain copy, and iterations beside a drain at 5 MB/s.

python -m benchmarks.drains --disk FOLDER      # some 5 minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import uuid
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from benchmarks.jobs import Jobs
from benchmarks.pressure import Line, Plan, measured, p99
from benchmarks.rounds import ratios, seconds
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.checkpoint.disk_format import SHARD_SUFFIX
from megatron_ft.checkpoint.drain import PIECE_BYTES, write_shards
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.source import open_newest
from tests.support.disk_samples import Memory

SHARD_MIB, ROUNDS = 256, 5
STATE_MIB, ITERATIONS, EVERY = 16, 2000, 120
SLOW_MIB = 5e6 / (1 << 20)


def rate(disk: Path) -> tuple[float, ...]:
    """Rate of a drain of one shard in rates of a plain copy to the same disk, by round."""
    with Jobs(1, "cpu", Path("/dev/shm"), 0).folder() as root:
        names = {"shards": ("dp0",), "width": SHARD_MIB * (1 << 20) // 12}
        memory = Memory(root, block_bytes=BLOCK_BYTES, **names)  # type: ignore[arg-type]
        memory.commit(1, 1)
        with open_newest(open_live(root, memory.job)) as shards:
            (shard,) = shards.values()

            def plain() -> None:
                with open(disk / f"plain-{uuid.uuid4().hex}", "wb", buffering=0) as file:
                    for at in range(0, len(shard.data), PIECE_BYTES):
                        file.write(shard.data[at : at + PIECE_BYTES].data)
                    os.fsync(file.fileno())
                os.unlink(file.name)

            def drained() -> float:
                with tempfile.TemporaryDirectory(dir=disk) as folder:
                    return seconds(lambda: write_shards(shards, Path(folder)))

            return ratios(ROUNDS, plain, drained)


def slow(disk: Path) -> tuple[list[Line], list[int]]:
    """A job that drains at 5 MB/s a node: its iterations, and the bytes of each checkpoint."""
    with (
        Jobs(1, "cpu", Path("/dev/shm"), 0).folder() as folder,
        tempfile.TemporaryDirectory(dir=disk) as to,
    ):
        plan = Plan(str(folder / "lines.json"), "none", STATE_MIB, ITERATIONS, to)
        flags = ["--drain-dir", to, "--drain-interval", str(EVERY), "--slots", "3"]
        lines = measured(plan, folder, *flags, "--drain-bandwidth-mib", f"{SLOW_MIB:.3f}")
        folders = [path for path in Path(to).iterdir() if path.is_dir()]
        return lines, [
            sum(path.stat().st_size for path in one.glob(f"*{SHARD_SUFFIX}")) for one in folders
        ]


def rows(disk: Path) -> Iterator[str]:
    """The figures, one a line."""
    found = rate(disk)
    text = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
    yield f"| rate, in plain copies of {SHARD_MIB} MiB | {text} |"
    lines, sizes = slow(disk)
    once = int(STATE_MIB * 1.5) << 20
    each = ", ".join(f"{size / once:.4f}" for size in sizes)
    yield f"| bytes written, in bytes of the state of both ranks without copies | {each} |"
    later = [line for line in lines if line.iteration > 100]
    without = [line for line in later if not line.phase]
    beside = [line for line in later if line.phase == "drain"]
    yield f"| iterations beside a drain at 5 MB/s, without one | {len(beside)}, {len(without)} |"
    pair = f"{p99(beside):.1f}, {p99(without):.1f}, ratio {p99(beside) / p99(without):.3f}"
    yield f"| their p99, ms | {pair} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, required=True, help="a folder on the disk to use")
    disk = parser.parse_args().disk
    print(f"{date.today()}, {os.cpu_count()} cores\n\n| drains | |\n| --- | ---: |", flush=True)
    for text in rows(disk):
        print(text, flush=True)


if __name__ == "__main__":
    main()
