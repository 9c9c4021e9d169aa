"""No spare is left on a real Slurm: memory is held until a job of its own brings a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.launch.virtual import default_root
from tests import slurm_cluster
from tests.jobs import Result, difference, oracle
from tests.slurm_cluster import SlurmCluster
from tests.slurm_jobs import SlurmJob

ITERATIONS = 60

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
    text = job.text().partition("draining before the job stops")[2]
    story = ["is on disk after", "memory is held", "n2 takes the place of n1"]
    story += ["pp0-tp0-dp1-ep0 from parity, the rest from own memory", "ended with 0"]
    found = [text.find(words) for words in story]
    assert found == sorted(found) and found[0] > 0, (found, job.story())
    assert not difference(job.result(), expected), job.story()
    job.until_gone(f"megatron-ft-host-of-{job.id}")
    assert not (default_root() / slurm_job_name).exists()
