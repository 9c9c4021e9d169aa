"""A node that Slurm's administrator drains under a running job."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_ft.core.environment import NODE
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_jobs import NEEDS_SLURM, Submit

ITERATIONS = 160

pytestmark = NEEDS_SLURM


@pytest.mark.timeout(300)
@pytest.mark.all_layouts
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


@pytest.mark.timeout(300)
@pytest.mark.all_layouts
def test_an_unhealthy_node_gets_no_ranks_and_the_printed_command_drains_it(
    slurm: SlurmCluster, submit: Submit, tmp_path: Path
) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntest ${NODE} != n1 || {{ echo the fan\\'s bad; exit 3; }}\n")
    hook.chmod(0o755)
    job = submit(nodes=3, spares=1, run_flags=f"--health-command {hook}")
    try:
        job.until_printed("n2 takes the place of n1")
        (line,) = (line for line in job.story().splitlines() if "To drain it: " in line)
        slurm.run(*shlex.split(line.partition("To drain it: ")[2]))
        assert "ended with 3: the fan's bad" in slurm.run("scontrol", "show", "node", "n1")
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        slurm.run("scontrol", "update", "nodename=n1", "state=resume", check=False)
