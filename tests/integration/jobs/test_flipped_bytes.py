"""One byte after the other of a live job's arenas is changed, region by region: it commits again.

Training goes on meanwhile, and nothing is restored, so what changes is found, written anew by its
writer, or looked at by nobody.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from tests.support.damage import Region, arenas, regions
from tests.support.disk_jobs import of_kind, wait_until
from tests.support.jobs import Job, Result, difference

pytestmark = pytest.mark.usefixtures("warm_trainers")
ITERATIONS = 400
BYTES = 3
"""Bytes of each region that change at once: its first, its last and one between."""
COMMITS = 3
Uninterrupted = Callable[[int, int], Result]


def places(path: Path) -> dict[str, list[Region]]:
    """The regions of an arena by name, those of both slots together."""
    found: dict[str, list[Region]] = {}
    with Arena.open(path) as arena:
        for slot in range(arena.geometry.slot_count):
            record = arena.slot(slot).record
            for region in regions(arena, record, slot) if record is not None else ():
                if region not in found.setdefault(region.name, []):
                    found[region.name].append(region)
    return found


def flip(path: Path, region: Region, chance: random.Random) -> None:
    between = chance.randrange(region.start, region.stop)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in {region.start, between, region.stop - 1}:
            memory[at] ^= 1 << chance.randrange(8)


def protected(job: Job) -> int:
    return sum(e.fields["level"] == "protected" for e in of_kind(job, "committed"))


def test_the_job_commits_again_whatever_byte_was_changed(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    job = Job(tmp_path, nodes=2, transport="tcp", iterations=ITERATIONS, iteration_seconds=0.03)
    made.append(job)
    chance = random.Random(5)
    names: list[str] = []

    def settle(what: str) -> None:
        before = protected(job)
        wait_until(job, lambda: protected(job) >= before + COMMITS, f"commits after {what}")

    def strike(job: Job) -> None:
        (path,) = arenas(job.cluster.node_dir("n0"))
        settle("the start")
        for name, found in places(path).items():
            for region in found:
                if region.start < region.stop:
                    flip(path, region, chance)
            names.append(name)
            settle(name)

    job.run((8, strike))
    print(names)
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
