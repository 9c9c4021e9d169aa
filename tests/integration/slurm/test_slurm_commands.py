"""On a real Slurm: torchrun as the training command, and jobs that depend on one another."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB
from tests.support.jobs import EXAMPLE, TORCHRUN, Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import ITERATIONS, NEEDS_SLURM, SlurmJob, Submit

MPICH = "MPICH_PREFIX"

pytestmark = [
    *NEEDS_SLURM,
    pytest.mark.all_layouts,
    pytest.mark.usefixtures("warm_trainers"),
    pytest.mark.timeout(900),
]


def processes(job: str, node: str, ranks: bool) -> list[int]:
    """Ranks that torchrun has started on a node, or torchrun itself."""
    return [
        pid
        for pid in procfs.own_processes()
        if (env := procfs.read_environment(pid)).get(JOB) == job
        and env.get("SLURMD_NODENAME") == node
        and "PET_NNODES" in env
        and ("LOCAL_RANK" in env) == ranks
        and os.readlink(f"/proc/{pid}/exe") == os.path.realpath(sys.executable)
    ]


def test_torchrun_in_the_batch_script(
    submit: Submit, uninterrupted: Uninterrupted, tmp_path: Path, slurm_job_name: str
) -> None:
    """A rank, a torchrun whose ranks do not notice, and a node are lost."""
    words = [EXAMPLE, "--iterations", ITERATIONS, "--losses", tmp_path / "losses.jsonl"]
    words += ["--width", 64, "--iteration-seconds", 0.5]
    train = [sys.executable, "-m", TORCHRUN, "--nproc-per-node", "2", *map(str, words)]
    site = {"RANKS_PER_NODE": "2", "TRAIN": " ".join(train)}
    job = submit(nodes=3, spares=1, run_flags="--lease-seconds 10", site=site)
    job.until_printed("committed (protected)")
    os.kill(processes(slurm_job_name, "n1", ranks=True)[0], signal.SIGKILL)
    job.until_printed("training\n", times=2)
    orphans = processes(slurm_job_name, "n0", ranks=True)
    assert len(orphans) == 2, job.story()
    for pid in orphans:
        # Else they would train on until they are ended.
        os.kill(pid, signal.SIGSTOP)
    (parent,) = processes(slurm_job_name, "n0", ranks=False)
    os.kill(parent, signal.SIGKILL)
    job.until_printed("training\n", times=3)
    assert not set(orphans) & set(processes(slurm_job_name, "n0", ranks=True)), job.story()
    job.until("iteration 20", lambda: 20 in job.result()[0])
    job.end_without("n1")
    after = job.text().partition("n2 takes the place of n1")[2]
    assert "pp0-tp0-dp2-ep0, pp0-tp0-dp3-ep0 from parity" in after, job.story()
    assert not difference(job.result(), uninterrupted(4, ITERATIONS)), job.story()


def test_jobs_that_depend_on_one_another_go_on_from_the_disk(
    slurm: SlurmCluster, uninterrupted: Uninterrupted, tmp_path: Path, slurm_job_name: str
) -> None:
    """The second begins when the first was stopped, the third never: the second has finished."""
    site = {"AFTER_TERM": "stop", "JOB": slurm_job_name}
    site |= {"SRUN_FLAGS": "--cpu-bind=none --wait=0"}
    jobs: list[SlurmJob] = []
    for number in range(3):
        before = [f"--dependency=afternotok:{job.id}" for job in jobs[-1:]]
        jobs.append(
            SlurmJob(
                slurm,
                tmp_path,
                f"{slurm_job_name}-{number}",
                iteration_seconds=0.3,
                run_flags="--lease-seconds 4 --drain-stop-seconds 100",
                site=site,
                flags=[*before, "--kill-on-invalid-dep=yes", "--open-mode=append"],
            )
        )
    name = f"{slurm_job_name}-after"
    words = ["--parsable", f"--job-name={name}", "--output=/dev/null", "--wrap=true"]
    follow = slurm.run("sbatch", f"--dependency=afterok:{jobs[1].id}", *words).strip()
    first, second, third = jobs
    first.until_printed("committed (protected)")
    assert [job.state() for job in jobs] == ["RUNNING", "PENDING", "PENDING"]
    first.tell("TERM")
    assert first.until_state("COMPLETED", "FAILED") == "FAILED"
    assert first.exit_code() == 13, first.story()
    assert second.until_state("COMPLETED", "FAILED") == "COMPLETED", second.story()
    assert "from disk" in second.text(), second.story()
    third.until_gone(f"{slurm_job_name}-2")
    assert third.state() == "CANCELLED", third.state()
    second.until_gone(name)
    assert slurm.job_state(follow) == "COMPLETED"
    assert not difference(second.result(), uninterrupted(2, ITERATIONS)), second.story()


@pytest.mark.skipif(MPICH not in os.environ, reason=f"{MPICH} names no folder of an MPICH")
def test_worlds_of_mpich(submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str) -> None:
    """Its proxies are steps; a node is lost and rebuilt by the world that follows."""
    prefix = Path(os.environ[MPICH])
    job = submit(
        nodes=3,
        spares=1,
        iteration_seconds=0.5,
        run_flags="--lease-seconds 10 --transport mpi",
        site={
            "MPI4PY_MPIABI": "mpich",
            "LD_LIBRARY_PATH": str(prefix / "lib"),
            "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}",
        },
    )
    job.until_printed("committed (protected)")
    worlds = [pid for pid in procfs.own_processes() if is_proxy_of(pid, slurm_job_name)]
    assert worlds, job.story()
    job.until("iteration 12", lambda: 12 in job.result()[0])
    job.end_without("n1")
    after = job.text().partition("n2 takes the place of n1")[2]
    assert "from parity" in after, job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def is_proxy_of(pid: int, job: str) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False
    return name == "hydra_pmi_proxy" and procfs.read_environment(pid).get(JOB) == job
