"""The SMPs that a supervisor keeps."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ControlPlaneError, SchedulerAwayError
from megatron_ft.supervisor import processes
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.processes import SmpFleet
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.supervisor import Supervisor
from tests.support.chaos_cluster import AWAY_NAME, EquippedCluster
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


def supervised(made: list[Any], folder: Path, state: JobState) -> Supervisor:
    """The supervisor of a job of two nodes, started as Slurm starts one."""
    name, settings = state.record.name, SnapshotConfig(protect="none", lease_seconds=4.0)
    spec = JobSpec(
        name=name, command=("true",), nodes=2, settings=settings, log_dir=folder / "logs"
    )
    cluster = EquippedCluster(name, ["n0", "n1"], away=folder / AWAY_NAME)
    made.append(SimpleNamespace(cluster=cluster))
    return Supervisor(spec, cluster, state)


def test_a_scheduler_that_is_away_costs_no_node(made: list[Any], tmp_path: Path) -> None:
    """Neither at the job's first start nor when the SMP of a node has died."""
    away = tmp_path / AWAY_NAME

    async def story(supervisor: Supervisor) -> None:
        members = supervisor.members
        try:
            for _ in range(2):
                away.touch()
                with pytest.raises(SchedulerAwayError, match="SMP of node n0.*Unable to contact"):
                    await members.admit_all({})
                away.unlink()
                assert sorted(await members.admit_all({})) == ["n0", "n1"]
                os.kill(supervisor.state.record.smps["n0"].pid, signal.SIGKILL)
                assert await members.smps.ended() == ["n0"]
        finally:
            await supervisor.fleet.close()

    with JobState(tmp_path / "state", f"test-{uuid.uuid4().hex[:8]}") as state:
        supervisor = supervised(made, tmp_path, state)
        asyncio.run(asyncio.wait_for(story(supervisor), WAIT_SECONDS))


def test_a_node_that_starts_nothing_is_no_scheduler_that_is_away(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler answers, so the node is lost, as its steps say too."""
    monkeypatch.setattr(EquippedCluster, "leaving", lambda self: {})
    (tmp_path / AWAY_NAME).touch()
    with JobState(tmp_path / "state", f"test-{uuid.uuid4().hex[:8]}") as state:
        smps = supervised(made, tmp_path, state).members.smps
        with pytest.raises(ControlPlaneError, match="Unable to contact") as caught:
            asyncio.run(asyncio.wait_for(smps.ensure("n0"), WAIT_SECONDS))
    assert type(caught.value) is ControlPlaneError
