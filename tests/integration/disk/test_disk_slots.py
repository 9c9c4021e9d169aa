"""Snapshots beside a drain that takes long: a third slot, made where memory allows."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megatron_ft.config.setting import AUTO
from tests.support.disk_jobs import of_kind, wait_until
from tests.support.fates import in_incarnation
from tests.support.jobs import Job, Result, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

INTERVAL = 2
SNAIL = 0.002
"""MiB a second at which no drain of this job ends within the test."""


def committed(job: Job) -> int:
    newest = job.supervisor.standing.committed
    return -1 if newest is None else newest.iteration


def test_a_trainer_killed_during_a_slow_drain_loses_no_more_than_at_other_times(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """With two slots nothing newer than what the drain reads could be committed."""
    job = Job(
        tmp_path,
        nodes=2,
        slots=AUTO,
        drain_dir=tmp_path / "disk",
        drain_interval=4,
        drain_bandwidth_mib=SNAIL,
    )
    made.append(job)
    killed: list[tuple[int, int]] = []

    def kill(job: Job) -> None:
        wait_until(job, lambda: job.supervisor.drains._plan_begun is not None, "for a drain")
        begun = job.supervisor.drains._plan_begun
        assert begun is not None
        drained = begun[0].iteration
        newer = drained + 3 * INTERVAL
        wait_until(job, lambda: committed(job) >= newer, "for snapshots beside the drain")
        killed.append((drained, committed(job)))
        os.kill(job.trainers()[0], signal.SIGKILL)

    with pytest.raises(asyncio.CancelledError):
        job.run((4, kill), (4, in_incarnation(2, Job.interrupt)))
    ((drained, newest),) = killed
    restored, source = job.restores()[-1]
    assert (restored >= newest > drained, source) == (True, "own memory"), job.story()
    assert not {"held", "drain_cost"} & set(job.kinds()), job.story()

    job.more |= {"drain_dir": None, "drain_interval": 0, "drain_bandwidth_mib": 0.0}
    job.run()
    assert job.restores()[-1][0] >= restored, "arenas of three slots serve a job without drains"
    assert not of_kind(job, "refused") and not difference(job.result(), two), job.story()
