"""Drains against a plain copy, and iterations beside a drain at 5 MB/s.

python -m benchmarks.drains --disk FOLDER         # some 5 minutes
python -m benchmarks.drains --slow-disk FOLDER    # iterations alone, no limit: some 10 minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import uuid
from collections.abc import Iterator, Sequence
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
SLOW_DISK_ITERATIONS, SLOW_DISK_EVERY, SLOW_DISK_ROUNDS = 6000, 600, 3
FIRST = 100
"""Iterations up to this one do not count."""


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


def beside_drains(disk: Path, iterations: int, *flags: str) -> tuple[list[Line], list[int]]:
    """A job that drains to the disk as ``flags`` say: iterations, and bytes of each checkpoint."""
    with (
        Jobs(1, "cpu", Path("/dev/shm"), 0).folder() as folder,
        tempfile.TemporaryDirectory(dir=disk) as to,
    ):
        plan = Plan(str(folder / "lines.json"), "none", STATE_MIB, iterations, to)
        drains = ["--drain-dir", to, *flags] if flags else []
        lines = measured(plan, folder, "--slots", "3", *drains)
        folders = [path for path in Path(to).iterdir() if path.is_dir()]
        return [line for line in lines if line.iteration > FIRST], [
            sum(path.stat().st_size for path in one.glob(f"*{SHARD_SUFFIX}")) for one in folders
        ]


def rows(disk: Path) -> Iterator[str]:
    """The figures, one a line."""
    yield f"| rate, in plain copies of {SHARD_MIB} MiB | {spread(rate(disk))} |"
    flags = ("--drain-interval", str(EVERY), "--drain-bandwidth-mib", f"{SLOW_MIB:.3f}")
    lines, sizes = beside_drains(disk, ITERATIONS, *flags)
    once = int(STATE_MIB * 1.5) << 20
    each = ", ".join(f"{size / once:.4f}" for size in sizes)
    yield f"| bytes written, in bytes of the state of both ranks without copies | {each} |"
    beside, without = parted(lines)
    yield f"| iterations beside a drain at 5 MB/s, without one | {len(beside)}, {len(without)} |"
    pair = f"{p99(beside):.1f}, {p99(without):.1f}, ratio {p99(beside) / p99(without):.3f}"
    yield f"| their p99, ms | {pair} |"


def slow_rows(disk: Path) -> Iterator[str]:
    """The figures of a disk that is slow by itself; jobs with drains and without alternate."""
    apart, jobs = list[float](), list[float]()
    for _ in range(SLOW_DISK_ROUNDS):
        drained, _ = beside_drains(
            disk, SLOW_DISK_ITERATIONS, "--drain-interval", str(SLOW_DISK_EVERY)
        )
        never, _ = beside_drains(disk, SLOW_DISK_ITERATIONS)
        beside, without = parted(drained)
        apart.append(p99(beside) / p99(without))
        jobs.append(p99(drained) / p99(never))
        counts = f"{len(beside)} iterations beside a drain, {len(without)} without one"
        pairs = f"{p99(beside):.1f}, {p99(without):.1f}; {p99(drained):.1f}, {p99(never):.1f}"
        yield f"| {counts}; p99, ms: these two; all of this job, of one without drains | {pairs} |"
    yield f"| p99 beside a drain, in that of the same job without one | {spread(apart)} |"
    yield f"| p99 of a job with drains, in that of one without | {spread(jobs)} |"


def parted(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """Iterations beside a drain and those without one, if no snapshot is under way."""
    return [x for x in lines if x.phase == "drain"], [x for x in lines if not x.phase]


def spread(found: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--disk", type=Path, help="a folder on the disk to use")
    which.add_argument("--slow-disk", type=Path, help="one on a disk that is slow by itself")
    given = parser.parse_args()
    print(f"{date.today()}, {os.cpu_count()} cores\n\n| drains | |\n| --- | ---: |", flush=True)
    for text in rows(given.disk) if given.disk else slow_rows(given.slow_disk):
        print(text, flush=True)


if __name__ == "__main__":
    main()
