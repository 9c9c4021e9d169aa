"""A job whose notes are removed while it runs."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from megatron_ft.core.errors import StaleIncarnationError
from megatron_ft.supervisor.job_state import JobState, read_record
from tests.support.disk_jobs import wait_for
from tests.support.jobs import Job

pytestmark = pytest.mark.usefixtures("warm_trainers")


def test_notes_that_are_removed_come_back_and_memory_serves(
    made: list[Job], tmp_path: Path
) -> None:
    job = Job(tmp_path, nodes=2, protect="none", iterations=16)
    made.append(job)
    folder = tmp_path / "state" / job.name

    def remove_notes_and_kill(job: Job) -> None:
        before = job.supervisor.state.record
        shutil.rmtree(folder)
        wait_for(job, "notes_removed")
        found = read_record(folder, job.name)
        assert found is not None and found.secret == before.secret
        os.kill(job.supervisor.trainers.pids()[0], signal.SIGKILL)

    job.run((6, remove_notes_and_kill))
    assert [source for _, source in job.restores()] == ["own memory"], job.story()


def test_a_supervisor_whose_notes_another_job_has_taken_ends(
    made: list[Job], tmp_path: Path
) -> None:
    job = Job(tmp_path, nodes=2, protect="none", iterations=400)
    made.append(job)
    folder = tmp_path / "state" / job.name

    def take_over(job: Job) -> None:
        shutil.rmtree(folder)
        JobState(folder, job.name).close()

    with pytest.raises(StaleIncarnationError, match="belong to another job"):
        job.run((6, take_over))
