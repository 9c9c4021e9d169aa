"""One byte after the other of a live job's arenas is changed, region by region: it commits again.

Training continues meanwhile, and nothing is restored, so what changes is found, written anew by its
writer, or looked at by nobody.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.launchers.launcher import NodeUnreachable
from tests.support import damage as r
from tests.support.damage import Region, arenas, regions
from tests.support.disk_jobs import of_kind, wait_until
from tests.support.jobs import Job, Result, difference

pytestmark = pytest.mark.usefixtures("warm_trainers")
ITERATIONS = 300
BYTES = 3
"""Bytes of each region that change at once: its first, its last and one between."""
COMMITS = 2
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


def commits_again(job: Job, what: str) -> None:
    before = protected(job)
    wait_until(job, lambda: protected(job) >= before + COMMITS, f"for commits after {what}")


def test_the_job_commits_again_whatever_byte_was_changed(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    job = Job(tmp_path, nodes=2, transport="tcp", iterations=ITERATIONS, iteration_seconds=0.015)
    made.append(job)
    chance = random.Random(5)

    def strike(job: Job) -> None:
        (path,) = arenas(job.cluster.node_dir("n0"))
        commits_again(job, "the start")
        found = places(path)
        assert {r.PADDING, r.DATA, r.TABLE, r.PARITY, r.ARENA_HEADER} < found.keys()
        for name, copies in found.items():
            for region in copies:
                if region.start < region.stop:
                    flip(path, region, chance)
            commits_again(job, name)

    job.run((8, strike))
    assert not job.restores(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.all_layouts
def test_a_damaged_snapshot_that_waits_for_parity_is_in_the_way_of_none(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """Beside the last protected one it fills the slots, and encoders refuse it each time."""
    job = Job(tmp_path, nodes=2, transport="tcp", iterations=ITERATIONS, iteration_seconds=0.015)
    made.append(job)

    def strike(job: Job) -> None:
        processes, pump = job.supervisor.encoder_group.processes, job.supervisor.pump
        start, processes.start = processes.start, _refuse  # type: ignore[method-assign, assignment]
        world = pump.encoders.usable
        job._loop.call_soon_threadsafe(pump.encoders.end, world, "the test ends it")
        wait_until(job, lambda: pump.crowded, "for a local snapshot beside a protected one")
        (path,) = arenas(job.cluster.node_dir("n0"))
        with Arena.open(path) as arena:
            (local,) = [n for n in range(2) if arena.slot(n).local_only]
            at = arena.geometry.data_offset(local) + 5
        flip(path, Region(r.DATA, at, at + 1), random.Random(1))
        processes.start = start  # type: ignore[method-assign]
        commits_again(job, "damage without parity")

    job.run((8, strike))
    texts = [event.text for event in of_kind(job, "given_up")]
    assert any("the newest snapshot is given up: its bytes are damaged" in t for t in texts), texts
    assert not job.restores(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def _refuse(*_: object) -> str:
    raise NodeUnreachable("no encoders in this test")
