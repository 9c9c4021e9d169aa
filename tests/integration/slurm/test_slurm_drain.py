"""A node that Slurm's administrator drains under a running job."""

from __future__ import annotations

import pytest

from tests.support import slurm_cluster
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import Submit

ITERATIONS = 160

MISSING = slurm_cluster.missing()

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.mark.timeout(300)
def test_a_drained_node_gives_its_ranks_to_the_spare(
    slurm: SlurmCluster, submit: Submit, uninterrupted: Uninterrupted
) -> None:
    """Without a spare for it the next one trains on."""
    flags = "--lease-seconds 4 --slots 3"  # a drain to disk may hold one
    job = submit(nodes=3, spares=1, iterations=ITERATIONS, run_flags=flags)
    job.until_printed("committed (protected)")
    try:
        slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=bad fan")
        job.until_printed("n1 is being evacuated (the scheduler drains it: bad fan")
        job.until_printed("n1 is evacuated: n2 has its ranks, 0 iterations are lost")
        slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=too hot")
        job.until_printed("n2 is not evacuated: no spare is left; training continues")
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        for node in ("n1", "n2"):
            slurm.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
