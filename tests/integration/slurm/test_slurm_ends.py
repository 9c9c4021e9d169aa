"""Every way in which a job on a real Slurm ends before training has: told to, or out of time."""

from __future__ import annotations

import shutil

import pytest

from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import ITERATIONS, NEEDS_SLURM, Submit

FLAGS = "--lease-seconds 4 --drain-stop-seconds 100"
"""A machine that is busy with other tests takes long to start what drains."""

pytestmark = [*NEEDS_SLURM, pytest.mark.timeout(600)]


@pytest.mark.all_layouts
def test_the_tasks_of_an_array_continue_one_another_until_usr1(
    slurm: SlurmCluster, submit: Submit, slurm_job_name: str
) -> None:
    """USR1 drains, frees the memory and ends the task, and the rest of the array never begins."""
    job = submit(run_flags=FLAGS, iterations=5000, flags=["--array=1-3%1"])
    job.until_printed("committed (protected)")
    job.tell("TERM", "1")
    job.until_printed("training\n", times=2)
    job.tell("USR1", "2")
    job.until_gone(slurm_job_name)
    states = [slurm.job_state(f"{job.id}_{task}") for task in (1, 2, 3)]
    assert states == ["FAILED", "FAILED", "CANCELLED"], (states, job.story())
    assert [job.exit_code(f"{job.id}_{task}") for task in (1, 2)] == [13, 13], job.story()
    text = job.text()
    assert "from disk" in text and "requeueing" not in text, job.story()
    assert text.count("the supervisor ended with 13") == 2, job.story()
    assert not (default_root() / f"{slurm_job_name}-{job.id}").exists()


@pytest.mark.all_layouts
def test_a_requeued_job_adopts_what_no_epilog_removed(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    slurm.frees_memory(False)
    job = submit(run_flags=FLAGS)
    job.until_printed("committed (protected)")
    job.tell("TERM")
    job.until_printed("requeueing job")
    job.start_now()
    slurm.frees_memory(True)
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    assert "from own memory" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.all_layouts
def test_a_job_that_runs_out_of_time_drains_and_goes_on(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Slurm warns up to a minute earlier than it was told to."""
    flags = ["--time=3", "--signal=B:TERM@60"]
    job = submit(run_flags=FLAGS, flags=flags, iteration_seconds=3.0)
    job.until_printed("requeueing job")
    assert "the supervisor ended with 13" in job.text(), job.story()
    job.start_now()
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.all_layouts
def test_an_array_ends_when_training_has(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """The second finishes, so the third never begins."""
    job = submit(run_flags=FLAGS, flags=["--array=1-3%1"])
    job.until_printed("committed (protected)")
    job.tell("TERM", "1")
    job.until_printed("the supervisor ended with 0")
    first, second, third = (f"{job.id}_{task}" for task in (1, 2, 3))
    job.until_gone(slurm_job_name)
    assert [slurm.job_state(task) for task in (first, second, third)] == [
        "FAILED",
        "COMPLETED",
        "CANCELLED",
    ], job.story()
    assert job.text().count("the supervisor ended with 13") == 1, job.story()
    assert "from disk" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.all_layouts
def test_arenas_of_an_older_incarnation_are_refused_after_a_requeue(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Three allocations: n0 and n1, n0 and n2, n0 and n1 again with what was left on it."""
    slurm.frees_memory(False)
    job = submit(run_flags=FLAGS, iteration_seconds=0.4)
    try:
        for incarnation, nodes in ((1, "n0,n2"), (2, "n0,n1")):
            job.until_printed("training\n", times=incarnation)
            job.until_printed("committed (protected)", times=incarnation)
            job.tell("TERM")
            job.until_printed("requeueing job", times=incarnation)
            job.start_now(f"ReqNodeList={nodes}")
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        slurm.frees_memory(True)
        shutil.rmtree(default_root() / slurm_job_name, ignore_errors=True)
    second, _, third = job.text().partition("n2 takes the place of n1")[2].partition("requeueing")
    assert "pp0-tp0-dp1-ep0 from parity, the rest from own memory" in second, job.story()
    assert "n1 takes the place of n2" in third, job.story()
    assert "pp0-tp0-dp1-ep0 from parity, the rest from own memory" in third, job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.all_layouts
def test_deputies_outlive_each_other_and_a_batch_node_that_ends_piece_by_piece(
    slurm: SlurmCluster, submit: Submit
) -> None:
    """Both deputies are lost, one after the other; then each srun of the batch node, then it."""
    site = {"DEPUTY_SECONDS": "2"}
    job = submit(nodes=5, spares=3, iterations=5000, run_flags=FLAGS, site=site)
    lost = ["n2", "n1", "n0"]
    try:
        job.until_printed("committed (protected)")
        job.until("two deputies", lambda: job.deputies() == {"n1", "n2"})
        slurm.kill_node("n2")
        job.until("a successor of n2", lambda: job.deputies() == {"n1", "n3"})
        slurm.kill_node("n1")
        slurm.kill_node("n3")
        lost.append("n3")
        job.until("successors of both", lambda: job.deputies() == {"n4"})
        slurm.kill_node("n0", sruns_first=True)
        job.until_state("PENDING")
        assert slurm.job_state(job.id) == "PENDING", "requeued"
    finally:
        slurm.run("scancel", job.id, check=False)
        for name in lost:
            if slurm.is_lost(name):
                slurm.start_node(name)


@pytest.mark.all_layouts
def test_a_cancelled_job_says_that_it_ends_and_why_nothing_is_drained(
    slurm: SlurmCluster, submit: Submit
) -> None:
    """The log of drains has a line of the first drain, which succeeded.

    Every tenth commit is printed: the second line is of a snapshot that is not on disk.
    """
    job = submit(run_flags=FLAGS, iterations=5000)
    job.until_printed("is on disk after")
    job.until_printed("committed (protected)", times=2)
    job.until("a deputy", lambda: job.deputies() == {"n1"})
    slurm.run("scancel", job.id)
    job.until_printed("the supervisor ended with 14")
    said = job.text().partition("a last drain")[2]
    assert "could not be written to disk; the job ends" in said, job.story()
    assert "srun: error: " in said and "bytes of iteration" not in said, job.story()
    assert job.until_state("CANCELLED", "PENDING") == "CANCELLED", "revived by its deputy"
