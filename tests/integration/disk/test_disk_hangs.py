"""A drain folder whose disk does not answer, as behind a dead file server: the job continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.disk_jobs import of_kind, wait_for, wait_until
from tests.support.frozen_disk import freezable, stuck
from tests.support.jobs import Job, Result, difference

pytestmark = pytest.mark.usefixtures("warm_trainers")


def test_a_disk_that_hangs_costs_drains_and_neither_a_restart_nor_the_end(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """A trainer dies while a drain cannot be ended; training then ends behind the same disk."""
    with freezable(tmp_path) as disk:
        job = Job(
            tmp_path, nodes=2, transport="tcp", drain_dir=disk.folder / "drains", drain_interval=2
        )
        made.append(job)

        def strike(job: Job) -> None:
            wait_for(job, "drained")
            disk.freeze()
            wait_until(job, lambda: bool(stuck(job.name)), "for a drain that hangs")
            os.kill(job.trainers()[0], signal.SIGKILL)
            wait_for(job, "recovered")
            wait_for(job, "drain_hangs")

        job.run((8, strike))
        assert stuck(job.name), "the disk has answered"
        assert not difference(job.result(), two), job.story()
        assert {source for _, source in job.restores()} == {"own memory"}, job.story()
        kinds = job.kinds()
        assert not {"refused", "node_lost", "not_freed"} & set(kinds), job.story()
        assert "drained" not in kinds[kinds.index("drain_hangs") :], job.story()
        (ended,) = [e.text for e in of_kind(job, "drain_failed") if "hangs" in e.text]
        assert ended.startswith("nothing more is drained, as the disk hangs: "), job.story()
        disk.thaw()
