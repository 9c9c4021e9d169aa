"""Jobs whose ranks all exit with 0, before their planned end, at it, or without a word of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megatron_ft.supervisor.outcome import Outcome
from tests.support.jobs import ROOT, Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

PROGRAM = ROOT / "tests/programs/stopping_training.py"
GONE_SECONDS = 30.0


def train(job: Job, until: int, *, last: int = 0, leave: str = "close") -> Outcome:
    """One start of the job to its end."""
    words = ["--until", until, "--last", last, "--leave", leave, "--file", job.folder / "ran"]
    job.command = (sys.executable, str(PROGRAM), *map(str, words))
    job.run()
    return job.end


def starts(job: Job) -> list[tuple[int, int]]:
    """The iterations from which rank 0 has started, and those that it had reached at its ends."""
    lines = (job.folder / "ran-0").read_text().splitlines()
    return [(int(first), int(reached)) for first, reached in map(str.split, lines)]


def held(job: Job) -> bool:
    """True if memory of the job is left on a node."""
    return any(job.cluster.job_dir.glob("*/*.arena"))


def made_job(made: list[Job], folder: Path, *, disk: bool = False, keep: float = 10.0) -> Job:
    """A job of two nodes that drains only where it has to."""
    drains = {"drain_dir": folder / "disk", "drain_interval": 10**6} if disk else {}
    job = Job(folder, nodes=2, keep_minutes=keep, **drains)
    made.append(job)
    return job


@pytest.mark.parametrize("disk", [True, pytest.param(False, marks=pytest.mark.all_layouts)])
def test_an_end_before_the_planned_one_is_continued(
    made: list[Job], tmp_path: Path, disk: bool
) -> None:
    job = made_job(made, tmp_path, disk=disk)
    assert train(job, 15, last=30) is Outcome.EARLY, job.story()
    assert held(job) and bool(list(tmp_path.glob("disk/iter_*"))) == disk, job.story()
    assert train(job, 30, last=30) is Outcome.FINISHED, job.story()
    (_, stopped), (resumed, reached) = starts(job)
    assert stopped == 15 and 10 <= resumed <= 15 and reached == 30
    assert not held(job), job.story()


@pytest.mark.all_layouts
def test_an_end_that_nobody_planned_keeps_memory_for_its_time(
    made: list[Job], tmp_path: Path
) -> None:
    job = made_job(made, tmp_path, keep=0.1)
    assert train(job, 15, leave="_exit") is Outcome.UNKNOWN, job.story()
    assert held(job), job.story()
    # Resumed within that time; it says nothing either.
    assert train(job, 20, leave="script") is Outcome.UNKNOWN, job.story()
    (_, _), (resumed, reached) = starts(job)
    assert 10 <= resumed <= 15 and reached == 20
    deadline = time.monotonic() + GONE_SECONDS
    while job.cluster.job_dir.exists():
        assert time.monotonic() < deadline, f"{job.cluster.job_dir} is not freed after 6 s"
        time.sleep(0.1)
    # Without its memory, the next start begins anew, unasked.
    assert train(job, 12, leave="finished") is Outcome.FINISHED, job.story()
    assert starts(job)[-1] == (0, 12) and not held(job), job.story()


@pytest.mark.all_layouts
def test_an_end_that_nobody_planned_is_drained_where_there_is_a_folder(
    made: list[Job], tmp_path: Path
) -> None:
    """Also that of ranks which exit before they have asked for anything."""
    job = made_job(made, tmp_path, disk=True)
    assert train(job, 15) is Outcome.DRAINED, job.story()
    assert not held(job) and list(tmp_path.glob("disk/iter_*")), job.story()
    assert train(job, 15, leave="before") is Outcome.DRAINED, job.story()
    assert train(job, 20, leave="finished") is Outcome.FINISHED, job.story()
    assert 10 <= starts(job)[-1][0] <= 15 and not held(job), job.story()


@pytest.mark.all_layouts
def test_ranks_that_exit_before_they_register_do_not_free_what_memory_holds(
    made: list[Job], tmp_path: Path
) -> None:
    job = made_job(made, tmp_path)
    assert train(job, 15, last=30) is Outcome.EARLY, job.story()
    assert train(job, 30, leave="before") is Outcome.UNKNOWN, job.story()
    assert train(job, 30, last=30, leave="script") is Outcome.FINISHED, job.story()
    assert 10 <= starts(job)[-1][0] <= 15 and not held(job), job.story()
