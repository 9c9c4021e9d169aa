"""No spare is left on a real Slurm: the way that costs least, by the limit that Slurm names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core.identity import HOLD, SHRINK
from megatron_ft.supervisor.event_log import EVENTS
from megatron_ft.supervisor.recovery_cost import HOST, LEFT, QUEUE, REQUEUE
from tests.integration.jobs.test_reshape_jobs import check, command
from tests.support.slurm_jobs import NEEDS_SLURM, SlurmJob, Submit

pytestmark = [*NEEDS_SLURM, pytest.mark.all_layouts, pytest.mark.timeout(600)]

NODES, LOST, HOUR = 3, "n1", 60
CASES = [
    pytest.param({}, 5, SHRINK, 2, id="five minutes left"),
    pytest.param({}, HOUR, REQUEUE, 3, id="an hour left"),
    pytest.param({"MAX_REQUEUES": "0"}, HOUR, SHRINK, 2, id="nothing starts it again"),
    pytest.param({"QUEUE_SECONDS": "3600"}, HOUR, HOLD, 3, id="a host soon, a long queue"),
]


@pytest.mark.parametrize(("site", "minutes", "way", "ranks"), CASES)
def test_the_cheapest_way_follows_from_the_figures(
    submit: Submit, tmp_path: Path, site: dict[str, str], minutes: int, way: str, ranks: int
) -> None:
    """The limit of a job that trains is shortened: what Slurm said at the start does not count."""
    soon = " --host-seconds 5" if way == HOLD else ""
    train = " ".join(command(tmp_path, seconds=0.1))
    policy = {"ON_NO_SPARE": "auto", "PROTECT": "rs:2+1", "TRAIN": train, **site}
    limits = [f"--time={HOUR}", "--signal=B:TERM@30"]
    job = submit(nodes=NODES, run_flags=f"--lease-seconds 4{soon}", site=policy, flags=limits)
    job.until_printed("committed (protected)")
    if minutes != HOUR:
        job.cluster.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
    job.lose_node(LOST)
    try:
        job.until_printed("no spare is left: ")
        (tmp_path / "gate").touch()
        if way == REQUEUE:
            job.until_printed("requeueing job")
            job.start_now()
        assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.story()
    finally:
        job.cluster.start_node(LOST)
    decision = decided(job)
    assert decision["way"] == way, job.story()
    check_told(job, decision, 60 * minutes)
    check(tmp_path, ranks)


def decided(job: SlurmJob) -> dict[str, Any]:
    lines = (job.folder / "state" / job.name / EVENTS).read_text().splitlines()
    (found,) = (event for event in map(json.loads, lines) if event["kind"] == "decided")
    return dict(found)


def check_told(job: SlurmJob, decision: Any, limit: float) -> None:
    """The event has all ways with figures, and its text those of them and what was guessed."""
    costs, why_not = decision["alternatives"], decision["impossible"]
    assert decision["way"] == min(costs, key=costs.get)
    assert {SHRINK, HOLD} <= costs.keys() and (REQUEUE in costs) != (REQUEUE in why_not)
    left = decision["figures"][LEFT]
    assert left["source"] == "Slurm" and limit - 200 < left["seconds"] < limit, left
    line = next(t for t in job.text().splitlines() if "no spare is left: " in t)
    assert all(f"{cost:,.0f}" in line for cost in costs.values()), line
    assert "not requeueing: nothing starts it again" in line or REQUEUE in costs, line
    guessed = line.partition("by default: ")[2]
    assert (f"{HOST} 1,800 s" in guessed) == (decision["way"] != HOLD), line
    assert QUEUE not in guessed and LEFT not in guessed, line
