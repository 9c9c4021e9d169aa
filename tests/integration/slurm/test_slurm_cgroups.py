"""Steps in control groups of their own on a real Slurm: what the end of one takes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB
from tests.support import slurm_cluster
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import NODE_MEMORY_MIB, SlurmCluster
from tests.support.slurm_jobs import ITERATIONS, Submit

MISSING = slurm_cluster.missing() or slurm_cluster.missing_cgroups()

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.mpi,
    pytest.mark.all_layouts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture(scope="module")
def slurm(
    tmp_path_factory: pytest.TempPathFactory, no_process_left: None
) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 4, cgroups=True)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_the_end_of_a_trainers_step_takes_neither_smp_nor_arenas(
    submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    """Each step has a group of its own, limited to what the job has of the node's memory."""
    job = submit(iteration_seconds=0.3, run_flags="--lease-seconds 6")
    job.until_printed("committed (protected)")
    groups = step_groups(slurm_job_name)
    smps = {pid: group for pid, group in groups.items() if is_smp(pid)}
    assert len(smps) == 2, (groups, job.story())
    others = {group for pid, group in groups.items() if pid not in smps}
    assert others and not others & set(smps.values()), (groups, job.story())
    limits = {int((group / "memory.limit_in_bytes").read_text()) for group in smps.values()}
    assert limits == {NODE_MEMORY_MIB << 20}
    job.kill_rank(1)
    job.until_printed("training\n", times=2)
    now = step_groups(slurm_job_name)
    assert smps.items() <= now.items(), (smps, now, job.story())
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    assert "from own memory" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def test_a_job_whose_batch_script_is_killed_resumes_from_memory(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted
) -> None:
    slurm.frees_memory(False)
    job = submit()
    try:
        job.until_printed("committed (protected)")
        job.until("a deputy", lambda: job.deputies() == {"n1"})
        job.tell("KILL")
        job.start_now()
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        slurm.frees_memory(True)
    assert "from own memory" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def test_a_job_whose_batch_node_is_set_down_resumes_on_the_others(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted
) -> None:
    job = submit(nodes=3, spares=1, iteration_seconds=0.6)
    try:
        job.until_printed("is on disk after")
        job.until("two deputies", lambda: job.deputies() == {"n1", "n2"})
        slurm.run("scontrol", "update", "nodename=n0", "state=down", "reason=no light")
        job.start_now()
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        slurm.run("scontrol", "update", "nodename=n0", "state=resume")
    assert "from disk" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


def step_groups(job: str) -> dict[int, Path]:
    """The memory group of the step of each process of a job, sruns and mpirun left out."""
    found = {}
    for pid in procfs.own_processes():
        if procfs.read_environment(pid).get(JOB) == job and (group := memory_group(pid)):
            found[pid] = group
    return found


def memory_group(pid: int) -> Path | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next(line.rpartition(":")[2] for line in lines if ":memory:" in line)
    head, found, step = path.partition("/step_")
    own = found and not step.startswith("batch")
    return Path(f"/sys/fs/cgroup/memory{head}{found}{step.partition('/')[0]}") if own else None


def is_smp(pid: int) -> bool:
    try:
        return b"megatron_ft.smp\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
