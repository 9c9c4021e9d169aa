"""Jobs that resume from their own drained checkpoints when memory cannot serve."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.disk_jobs import (
    SHARDS,
    of_kind,
    signal_trainers,
    stop_until_drained,
    wait_until,
    wait_until_none_is_due,
)
from tests.support.fates import in_incarnation
from tests.support.jobs import Job, Result, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def test_a_job_without_memory_goes_on_from_the_newest_whole_drain_of_its_lineage(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """Three checkpoints: A of incarnation 1, B after it but given up for A, C of incarnation 2 and
    damaged."""
    disk, aside = tmp_path / "disk", tmp_path / "aside"
    job = Job(tmp_path, nodes=2, spares=2, drain_dir=disk, drain_interval=4, drain_keep=9)
    made.append(job)

    def lose_all_but_a(job: Job) -> None:
        stop_until_drained(job, 1)
        signal_trainers(job, signal.SIGCONT)
        due = of_kind(job, "drained")[0].fields["iteration"] + 4
        wait_until(job, lambda: of_kind(job, "committed")[-1].fields["iteration"] >= due)
        stop_until_drained(job, 2)
        wait_until_none_is_due(job, 4)
        *others, b = folders(job)[1:]
        remove(others)
        b.rename(aside)
        for node in ("n0", "n1"):
            job.cluster.kill_node(node)

    def end_incarnation_2(job: Job) -> None:
        due = of_kind(job, "drained")[0].fields["iteration"] + 4
        wait_until(job, lambda: is_committed_later(job, due), "for a snapshot that is due")
        signal_trainers(job, signal.SIGSTOP)
        wait_until(job, lambda: "-1." not in folders(job)[-1].name, "for its drain")
        job.interrupt()

    with pytest.raises(asyncio.CancelledError):
        job.run((8, lose_all_but_a), (8, in_incarnation(2, end_incarnation_2)))
    to_a = of_kind(job, "restoring")[-1]
    first = [folder for folder in folders(job) if "-1." in folder.name]
    a, b, (*others, c) = first[0], first[-1], folders(job)[len(first) :]
    remove(others)
    aside.rename(b)
    flip(c / f"{SHARDS[1]}.safetensors", -100)
    for one, other in (("n2", "n0"), ("n3", "n1")):
        job.cluster.kill_node(one)
        job.cluster.revive(other)
    job.run()
    to_c, again = of_kind(job, "restoring")[-2:]
    assert str(c) in to_c.text and str(a) in to_a.text and str(a) in again.text, job.story()
    assert f"{b.name} is off the job's lineage" in again.text, job.story()
    (failed,) = of_kind(job, "load_failed")
    assert "do not match their digests" in failed.text, job.story()
    for event in (to_a, to_c, again):
        assert event.fields["source"] == "disk" and str(disk) in event.text, job.story()
    assert to_a.fields["iterations_lost"] > 0, job.story()
    assert not difference(job.result(), two), job.story()


def is_committed_later(job: Job, iteration: int) -> bool:
    """True if an incarnation after the first has committed a snapshot so far."""
    committed = job.supervisor.standing.committed
    return committed is not None and committed[0].incarnation > 1 and committed[1] >= iteration


def remove(others: Sequence[Path]) -> None:
    """Remove what was drained besides, as trainers had gone on."""
    for folder in others:
        shutil.rmtree(folder)


def folders(job: Job) -> list[Path]:
    return [Path(event.fields["folder"]) for event in of_kind(job, "drained")]


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_new_job_starts_from_what_another_one_drained(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    disk, later = tmp_path / "disk", tmp_path / "later"
    first = Job(tmp_path, nodes=2, drain_dir=disk, drain_interval=30)
    made.append(first)
    first.run()
    later.mkdir()
    # One node with both ranks, and other protection: stripes are planned anew.
    second = Job(
        later,
        nodes=1,
        ranks_per_node=2,
        protect="none",
        restore_from=disk,
        drain_dir=disk,
        drain_interval=10**6,
    )
    made.append(second)
    second.run()
    (event,) = of_kind(second, "restoring")
    assert event.fields["iteration"] == of_kind(first, "drained")[-1].fields["iteration"]
    losses, sha = second.result()
    assert sha == two[1] and min(losses) == event.fields["iteration"] + 1, second.story()
    assert all(losses[at] == two[0][at] for at in losses), second.story()
