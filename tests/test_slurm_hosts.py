"""No spare is left on a real Slurm: memory is held until a job of its own brings a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.launch.virtual import default_root
from tests import slurm_cluster
from tests.jobs import Result, difference, oracle
from tests.slurm_cluster import SlurmCluster
from tests.slurm_jobs import SlurmJob

ITERATIONS = 40

MISSING = slurm_cluster.missing()

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.mpi,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, warm_trainers: None) -> Result:
    return oracle(tmp_path_factory.mktemp("oracle"), 2, ITERATIONS)


@pytest.mark.all_layouts
def test_memory_is_held_until_another_job_brings_a_host(
    slurm: SlurmCluster, tmp_path: Path, slurm_job_name: str, expected: Result
) -> None:
    job = SlurmJob(
        slurm,
        tmp_path,
        slurm_job_name,
        nodes=2,
        iterations=ITERATIONS,
        iteration_seconds=0.15,
        site={"SPARES": "0", "ON_NO_SPARE": "hold", "RUN_FLAGS": "--lease-seconds 4"},
    )
    job.until_printed("committed (protected)")
    job.lose_node("n1")
    try:
        assert job.until_state("COMPLETED", "FAILED", "PENDING") == "COMPLETED", job.story()
    finally:
        slurm.start_node("n1")
    before, _, after = job.text().partition("n2 takes the place of n1")
    assert "is on disk after" in before and "memory is held" in before, job.story()
    assert "pp0-tp0-dp1-ep0 from parity, the rest from own memory" in after, job.story()
    assert not difference(job.result(), expected), job.story()
    job.until_gone(f"megatron-ft-host-of-{job.id}")
    assert not (default_root() / slurm_job_name).exists()


@pytest.mark.all_layouts
def test_a_host_that_does_not_come_is_waited_for_only_so_long(
    slurm: SlurmCluster, tmp_path: Path, slurm_job_name: str
) -> None:
    """Four nodes and no spare: all is on disk when the job ends; what it asked for is withdrawn."""
    flags = "--lease-seconds 8 --hold-seconds 3 --sbatch-flags=--begin=now+3600"
    job = SlurmJob(
        slurm,
        tmp_path,
        slurm_job_name,
        nodes=4,
        iterations=5000,
        iteration_seconds=0.15,
        site={
            "SPARES": "0",
            "PROTECT": "rs:3+1",
            "ON_NO_SPARE": "hold",
            "RUN_FLAGS": flags,
            "MAX_REQUEUES": "0",
        },
    )
    job.until_printed("committed (protected)")
    job.lose_node("n1")
    try:
        assert job.until_state("COMPLETED", "FAILED") == "FAILED", job.story()
    finally:
        slurm.start_node("n1")
    assert job.exit_code() == 11, job.story()
    before, _, after = job.text().partition("no replacement host came within 3 s")
    assert "is on disk after" in before and "no spare is left" in after, job.story()
    job.until_gone(f"megatron-ft-host-of-{job.id}")
    assert list((tmp_path / "drained").glob("iter_*")), job.story()
