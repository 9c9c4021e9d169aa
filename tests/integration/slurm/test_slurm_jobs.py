"""The shipped batch script on a real Slurm: trainers and nodes die, jobs are requeued."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import ENDED, NEEDS_SLURM, WAIT_SECONDS, Submit

ITERATIONS = 70

pytestmark = NEEDS_SLURM


@pytest.mark.timeout(600)
def test_the_shipped_script_survives_a_trainer_a_node_and_a_requeue(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Before the job runs again the site's epilog frees its memory, so it resumes from the disk."""
    flags = "--lease-seconds 4"
    job = submit(nodes=3, spares=1, iterations=ITERATIONS, run_flags=flags)
    job.until_printed("committed (protected)")
    job.kill_rank(1)
    job.until_printed("training\n", times=2)
    job.until_printed("committed (protected)", times=2)
    job.lose_node("n1")
    job.until_printed("training\n", times=3)
    slurm.start_node("n1")
    job.tell("TERM")
    job.until_printed("requeueing job")
    job.start_now()
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    text = job.text()
    sources = ["from own memory", "n2 takes the place of n1"]
    sources += [
        "pp0-tp0-dp1-ep0 from parity, the rest from own memory",
        "the supervisor ended with 13",
    ]
    sources += ["from disk", "the supervisor ended with 0"]
    found = [text.find(words) for words in sources]
    assert found == sorted(found) and found[0] > 0, (found, job.story())
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
    assert not (default_root() / slurm_job_name).exists()


@pytest.mark.timeout(300)
def test_the_doctor_passes_a_good_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    """On nodes where no process of ours has been; afterwards nothing of the doctor is there.

    It says with how many nodes a job of Megatron would continue.
    """
    words = [sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--launcher", "slurm"]
    words += ["--protect", "rs:2+1", "--shard-gib", "0.01", "--on-no-spare", "shrink"]
    words += ["--state-dir", str(tmp_path / "state"), "--", sys.executable, "-c", "pass"]
    words += ["--inmem-snapshot", "--micro-batch-size", "1", "--global-batch-size", "6"]
    script, output = tmp_path / "doctor.sbatch", tmp_path / "output"
    script.write_text(f"#!/bin/bash\n#SBATCH --no-kill\n{shlex.join(words)}\n")
    flags = ["--nodes=3", "--ntasks-per-node=1", f"--output={output}"]
    job = slurm.run("sbatch", "--parsable", *flags, str(script)).strip()
    deadline = time.monotonic() + WAIT_SECONDS
    while (state := slurm.job_state(job)) not in ENDED:
        assert time.monotonic() < deadline, f"the doctor does not end ({state})"
        time.sleep(0.3)
    said = output.read_text()
    assert state == "COMPLETED" and "refused" not in said, said
    assert "all 3 nodes answer" in said and "--no-kill" in said, said
    assert "the job continues with 2 nodes (rs:1+1)" in said, said
    assert not list(default_root().glob("doctor-*")), said


@pytest.mark.all_layouts
@pytest.mark.timeout(300)
def test_a_job_that_slurm_would_kill_with_its_node_says_so(
    slurm: SlurmCluster, submit: Submit, slurm_job_name: str
) -> None:
    job = submit(site={"SBATCH_NO_KILL": "off"})
    job.until_printed("warning: --no-kill is not seen")
    slurm.run("scancel", job.id)
    job.until_gone(slurm_job_name)


@pytest.mark.all_layouts
@pytest.mark.timeout(600)
def test_a_node_with_several_ranks_is_lost(submit: Submit, uninterrupted: Uninterrupted) -> None:
    """Each rank is a step of its own; all shards of the node come back from parity."""
    job = submit(
        nodes=3,
        spares=1,
        iterations=ITERATIONS,
        iteration_seconds=0.3,
        run_flags="--lease-seconds 6",
        site={"RANKS_PER_NODE": "2"},
    )
    job.until_printed("committed (protected)")
    job.kill_rank(2)
    job.until_printed("training\n", times=2)
    job.until_printed("committed (protected)", times=2)
    job.end_without("n1")
    after = job.text().partition("n2 takes the place of n1")[2]
    assert "pp0-tp0-dp2-ep0, pp0-tp0-dp3-ep0 from parity" in after, job.story()
    assert not difference(job.result(), uninterrupted(4, ITERATIONS)), job.story()


@pytest.mark.all_layouts
@pytest.mark.timeout(600)
def test_an_srun_and_the_supervisor_are_killed(
    submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Slurm cancels the step of a killed srun, here that of an SMP.  The arenas stay."""
    job = submit(iterations=ITERATIONS, iteration_seconds=0.3)
    job.until_printed("committed (protected)")
    kill_first_with("--nodelist=n1", "megatron_ft.smp")
    job.until_printed("the SMP of n1 died; a new one took its arenas")
    kill_first_with("run", "--launcher", "slurm", slurm_job_name)
    job.until_printed("start 1 of 3 is over")
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    after = job.text().partition("start 1 of 3 is over")[2]
    assert "from own memory" in after and "from parity" not in after, job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def kill_first_with(*words: str) -> None:
    """SIGKILL to the oldest process whose command line has these words."""
    found = []
    for pid in procfs.own_processes():
        with suppress(OSError):
            given = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            found += [pid] if set(words) <= set(given) else []
    assert found, words
    os.kill(min(found), signal.SIGKILL)
