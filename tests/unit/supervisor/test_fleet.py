"""The SMPs that a supervisor keeps."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.supervisor import processes
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.processes import SmpFleet
from tests.support.jobs import Job

WAIT_SECONDS = 100.0


def test_an_smp_that_was_too_slow_does_not_pass_for_the_one_before(
    made: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, nodes=1, protect="none")
    made.append(job)

    async def story(state: JobState) -> None:
        smps = SmpFleet(job.cluster, state, job.spec())
        await smps.ensure("n0")
        first = state.record.smps["n0"]
        os.kill(first.pid, signal.SIGKILL)
        assert await smps.ended() == ["n0"]
        with monkeypatch.context() as patched:
            patched.setattr(processes, "SMP_START_SECONDS", 0.05)
            with pytest.raises(ControlPlaneError, match="did not serve"):
                await smps.ensure("n0")
        endpoint = await smps.ensure("n0")
        assert state.record.smps["n0"] != first and smps.alive("n0")
        assert state.record.smps["n0"].endpoint == endpoint

    with JobState(tmp_path / "state", job.name) as state:
        asyncio.run(asyncio.wait_for(story(state), WAIT_SECONDS))
