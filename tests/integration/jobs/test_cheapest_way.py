"""Jobs without a spare that take the cheapest way: fewer nodes, a wait, or an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.supervisor.event_log import EVENTS, EventLog
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.membership import NoSpareError
from tests.integration.jobs.test_reshape_jobs import MORE, check, elastic_job, finish, lose, told
from tests.support.jobs import Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def decisions(job: Job) -> list[dict[str, Any]]:
    return [event.fields for event in job.events if event.kind == "decided"]


def revive(job: Job) -> None:
    job.cluster.revive("n1")


def cheap_job(made: list[Job], folder: Path, **changes: Any) -> Job:
    job = elastic_job(folder, on_no_spare="auto", **changes)
    made.append(job)
    return job


@pytest.mark.all_layouts
def test_it_shrinks_where_a_wait_would_cost_more(made: list[Job], tmp_path: Path) -> None:
    job = cheap_job(made, tmp_path)
    job.run((10, lose("n1")), (30, finish))
    (decision,) = decisions(job)
    assert decision["way"] == "shrink" and told(job, "shrunk"), job.story()
    costs = decision["alternatives"]
    assert 0 < costs["shrink"] < costs["hold"] and "requeue" in decision["impossible"]
    (text,) = told(job, "decided")
    assert text.startswith("no spare is left: continuing on 3 nodes (about "), text
    assert "host 1,800 s" in text.partition("by default: ")[2], text
    check(tmp_path, 3)


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=MORE)])
@pytest.mark.all_layouts
def test_it_waits_for_a_host_that_is_expected_soon(
    made: list[Job], tmp_path: Path, measured: bool
) -> None:
    """Expected by a setting, or because lost nodes of this job came back before."""
    job = cheap_job(made, tmp_path, host_seconds=0.0 if measured else 1.0)
    if measured:
        came_back(tmp_path / "state" / job.name, seconds=1.5)
    job.at_event = {"holding": revive}
    job.run((10, lose("n1")), (30, finish))
    (decision,) = decisions(job)
    assert decision["way"] == "hold" and not told(job, "shrunk"), job.story()
    expected = (1.5, "1 measured") if measured else (1.0, "given, 0 measured")
    assert tuple(decision["figures"]["host"].values()) == expected
    assert told(job, "host") == ["n1 has come as a replacement host"]
    assert not told(job, "from_disk") and not told(job, "reshaped"), job.story()
    check(tmp_path, 4)


def came_back(state: Path, seconds: float) -> None:
    """Events of a supervisor before this one, whose job drained in 1 s and held for a host."""
    state.mkdir(parents=True)
    log = EventLog(state / EVENTS, "job")
    kinds = ("supervising", "salvaging", "holding", "incarnation_ended")
    for kind, at in zip(kinds, (1, 2, 3, 3 + seconds), strict=True):
        log.record(JobEvent(kind, "", {}, at))


@MORE
def test_it_shrinks_after_a_wait_in_vain(made: list[Job], tmp_path: Path) -> None:
    drains = {"drain_dir": tmp_path / "disk", "drain_interval": 1000}
    job = cheap_job(made, tmp_path, hold_seconds=2.0, **drains)
    came_back(tmp_path / "state" / job.name, seconds=1.5)
    job.run((10, lose("n1")), (30, finish))
    first, second = decisions(job)
    assert (first["way"], second["way"]) == ("hold", "shrink"), job.story()
    assert told(job, "hold_timed_out") and told(job, "salvaging"), job.story()
    assert second["impossible"]["hold"] == "none came"
    check(tmp_path, 3)


@pytest.mark.parametrize("queue", [0.0, pytest.param(5.0, marks=MORE)])
@pytest.mark.all_layouts
def test_it_stops_where_a_start_anew_is_cheapest_or_nothing_else_is_left(
    made: list[Job], tmp_path: Path, queue: float
) -> None:
    """A program that says nothing of other numbers of ranks cannot shrink."""
    given: dict[str, Any] = {"drain_dir": tmp_path / "disk", "drain_interval": 1000}
    job = Job(tmp_path, 2, on_no_spare="auto", queue_seconds=queue, hold_seconds=1.0, **given)
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((10, lose("n1")))
    ways = [decision["way"] for decision in decisions(job)]
    assert ways == (["requeue"] if queue else ["hold", None]), job.story()
    assert told(job, "drained"), "what is in memory goes to disk before the job ends"
