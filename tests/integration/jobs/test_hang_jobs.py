"""Jobs in which a rank stops making progress: it is named, its stacks are kept, the job
continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.core.errors import RestartBudgetError
from megatron_ft.supervisor.autopsy import LOCKED, SUSPENDED
from megatron_ft.supervisor.heartbeats import PARTS
from tests.programs.faulty_example import HANGS
from tests.support.jobs import FAULTY, Job, Result, Uninterrupted, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS = 60
QUICK = {"hang_seconds": 3.0, "register_timeout_seconds": 60.0}


@pytest.fixture(scope="module")
def three(uninterrupted: Uninterrupted) -> Result:
    return uninterrupted(3, ITERATIONS)


@pytest.fixture
def new(made: list[Job], tmp_path: Path) -> Callable[..., Job]:
    def make(*hangs: str, **settings: object) -> Job:
        standard: dict[str, object] = {"nodes": 3, "protect": "xor:3", **QUICK}
        standard["iterations"] = ITERATIONS
        standard |= {"script": FAULTY, "environment": {HANGS: " ".join(hangs)}}
        job = Job(tmp_path, **{**standard, **settings})  # type: ignore[arg-type]
        made.append(job)
        return job

    return make


def stacks(event: object, rank: int) -> str:
    return Path(event.fields["folder"], f"rank{rank}.txt").read_text()  # type: ignore[attr-defined]


def test_each_kind_of_hang_is_named_kept_and_survived(
    new: Callable[..., Job], three: Result
) -> None:
    job = new("1:loop:10:1", "2:c:18:0", "3:collective:26:1", "4:suspended:34:0")
    job.run()
    hangs = [event for event in job.events if event.kind == "hang"]
    assert [event.fields["ranks"] for event in hangs] == [[1], [0], [1], [0]], job.story()
    assert [event.fields["how"] for event in hangs] == ["", LOCKED, "", SUSPENDED]
    places = ["loop_for_ever", "block_in_c", "enter_alone", "be_suspended"]
    for event, rank, place in zip(hangs, (1, 0, 1, 0), places, strict=True):
        assert f"at {place} (" in event.text, event.text
        assert f"in {place}\n" in stacks(event, rank)
        assert "in train_one" in stacks(event, 1 - rank)
    assert not difference(job.result(), three), job.story()
    recovered = [event for event in job.events if event.kind == "recovered"]
    assert len(recovered) == 4, job.story()
    for event in recovered:
        assert event.fields["detect"] >= QUICK["hang_seconds"]
        parts = {name: event.fields[name] for name in PARTS}
        assert all(value >= 0 for value in parts.values()), parts
        # Parts of the slowest rank each: together at least the whole.
        assert sum(parts.values()) >= event.fields["total"] - 0.25, event.text


@pytest.mark.all_layouts
def test_no_alarm_in_500_clean_iterations(new: Callable[..., Job]) -> None:
    job = new(iterations=510, iteration_seconds=0.0)
    job.run()
    assert not {"hang", "watch_failed"} & set(job.kinds()), job.story()


@pytest.mark.all_layouts
def test_the_same_hang_three_times_is_one_failure(new: Callable[..., Job]) -> None:
    """Without quarantine, as failures count anew when an older snapshot is taken."""
    quick = {"hang_seconds": 1.5, "register_timeout_seconds": 8.0, "quarantine_iterations": 0}
    job = new("1:loop:10:1", "2:loop:9:1", "3:loop:9:1", **quick)
    with pytest.raises(RestartBudgetError, match="hang of rank 1 at loop_for_ever"):
        job.run()
