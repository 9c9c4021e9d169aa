"""A real Slurm whose controller is away: as a job starts, and as it is to be requeued."""

from __future__ import annotations

import time

import pytest

from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import ITERATIONS, NEEDS_SLURM, Submit

AWAY_SECONDS = 25.0
FLAGS = "--lease-seconds 4 --drain-stop-seconds 100"

pytestmark = [*NEEDS_SLURM, pytest.mark.all_layouts, pytest.mark.timeout(600)]


def test_a_requeue_waits_for_the_controller(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Its steps cannot drain then: Slurm starts none.  The job resumes from the drain before."""
    job = submit(run_flags=FLAGS, iteration_seconds=2.0)
    job.until_printed("is on disk after")
    job.tell("TERM")
    slurm.stop_controller()
    try:
        deadline = time.monotonic() + 200
        while "Slurm does not answer" not in job.text():
            assert time.monotonic() < deadline, job.story()
            time.sleep(0.3)
    finally:
        slurm.start_controller()
    job.until_printed("requeueing job")
    job.start_now()
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def test_a_controller_that_is_away_as_a_job_starts_ends_no_job(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    job = submit(run_flags=FLAGS)
    job.until("output", lambda: job.output.exists())
    slurm.stop_controller()
    try:
        time.sleep(AWAY_SECONDS)  # what happens meanwhile differs with the moment of the loss
    finally:
        slurm.start_controller()
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def test_a_job_submitted_without_its_environment_has_deputies(
    slurm: SlurmCluster, submit: Submit, slurm_job_name: str
) -> None:
    """As under a site's --export=NONE, of which sbatch tells the script, and so each srun in it."""
    site = {"SLURM_EXPORT_ENV": "NONE"}
    job = submit(run_flags=FLAGS, iterations=2000, nodes=3, spares=1, site=site)
    job.until_printed("committed (protected)")
    job.until("two deputies", lambda: len(job.deputies()) == 2)
    job.tell("USR1")
    job.until_state("FAILED")
