"""No spare is left on a real Slurm: memory is held until a job of its own brings a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import Uninterrupted, difference
from tests.support.slurm_jobs import ITERATIONS, NEEDS_SLURM, Submit

pytestmark = [*NEEDS_SLURM, pytest.mark.timeout(600)]


@pytest.mark.all_layouts
def test_memory_is_held_until_another_job_brings_a_host(
    submit: Submit, uninterrupted: Uninterrupted, slurm_job_name: str
) -> None:
    job = submit(site={"ON_NO_SPARE": "hold"})
    job.until_printed("committed (protected)")
    job.end_without("n1")
    before, _, after = job.text().partition("n2 takes the place of n1")
    assert "is on disk after" in before and "memory is held" in before, job.story()
    assert "pp0-tp0-dp1-ep0 from parity, the rest from own memory" in after, job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
    job.until_gone(f"megatron-ft-host-of-{job.id}")
    assert not (default_root() / slurm_job_name).exists()


@pytest.mark.all_layouts
def test_a_host_that_does_not_come_is_waited_for_only_so_long(
    submit: Submit, tmp_path: Path
) -> None:
    """Four nodes and no spare: all is on disk when the job ends; what it asked for is withdrawn."""
    flags = "--lease-seconds 8 --hold-seconds 3 --sbatch-flags=--begin=now+3600"
    site = {"PROTECT": "rs:3+1", "ON_NO_SPARE": "hold", "MAX_REQUEUES": "0"}
    job = submit(nodes=4, iterations=5000, run_flags=flags, site=site)
    job.until_printed("committed (protected)")
    job.end_without("n1", "FAILED")
    assert job.exit_code() == 11, job.story()
    before, _, after = job.text().partition("no replacement host came within 3 s")
    assert "is on disk after" in before and "no spare is left" in after, job.story()
    job.until_gone(f"megatron-ft-host-of-{job.id}")
    assert list((tmp_path / "drained").glob("iter_*")), job.story()
