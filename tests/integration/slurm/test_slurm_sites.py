"""Habits of sites, on a real Slurm: no environment for jobs, slow prologs, hard cancels."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import ITERATIONS, NEEDS_SLURM, Submit

FLAGS = "--lease-seconds 4 --drain-stop-seconds 100"

pytestmark = [*NEEDS_SLURM, pytest.mark.all_layouts, pytest.mark.timeout(600)]


def test_a_job_submitted_with_export_none_outlives_its_batch_node(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Site variables stand in the script then; each srun in it must export them all the same."""
    job = submit(run_flags=FLAGS, nodes=3, spares=1, iteration_seconds=1.0, bare=True)
    # The site's epilog frees the memory before the job runs again, so it resumes from the disk.
    job.until_printed("is on disk after")
    job.until("two deputies", lambda: len(job.deputies()) == 2)
    job.lose_node("n0")
    try:
        job.start_now()
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        slurm.start_node("n0")
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def test_a_slow_prolog_ends_no_job(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Each node's first step waits for it, longer than the start of an SMP takes."""
    slurm.delays_steps(25)
    try:
        job = submit(run_flags=FLAGS)
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        slurm.delays_steps(0)
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def test_a_job_that_is_cancelled_by_sigkill_leaves_nothing(
    slurm: SlurmCluster, submit: Submit, slurm_job_name: str
) -> None:
    job = submit(run_flags=FLAGS, iterations=2000, nodes=3, spares=1)
    job.until_printed("committed (protected)")
    slurm.run("scancel", "--signal=KILL", job.id)
    job.until_gone(slurm_job_name)
    assert job.state() == "CANCELLED" and "requeueing" not in job.text(), job.story()
    assert not (default_root() / slurm_job_name).exists()


def test_homes_of_the_nodes_may_differ(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """Nothing that nodes share, and nothing that they need, is in a home."""
    site = {"HOME": str(tmp_path / "nobody-made-this")}
    job = submit(run_flags=FLAGS, nodes=3, spares=1, iteration_seconds=0.5, site=site)
    job.until_printed("committed (protected)")
    job.end_without("n1")
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
