"""Whole jobs whose state grows beyond its arenas, with and without a failure on the way."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs.test_jobs import kill_rank, limit_files
from tests.programs import changing_training as program
from tests.support.jobs import Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS, CHANGE = 80, 10
BLOCK = 64 << 10
MORE = pytest.mark.all_layouts


def growing(tmp_path: Path, *, change: int = CHANGE, values: int = 0, **options: Any) -> Job:
    words = [program.__file__, "--folder", str(tmp_path), "--iterations", str(ITERATIONS)]
    words += ["--change", str(change), "--values", str(values)]
    job = Job(tmp_path, nodes=2, block_bytes=BLOCK, command=(sys.executable, *words), **options)
    job.told = (change, values)  # type: ignore[attr-defined]
    return job


def open_gate(job: Job) -> None:
    (job.folder / "gate").touch()


def once_committed(job: Job) -> None:
    """Open the gate at the next commit."""
    job.at_event["committed"] = open_gate


def check(job: Job) -> None:
    """All ranks have ended with the state of a run that nothing has interrupted."""
    change, values = job.told  # type: ignore[attr-defined]
    for rank in range(2):
        found = json.loads((job.folder / f"result-{rank}.json").read_text())
        expected = program.expected(rank, change, values, ITERATIONS)
        assert found["digest"] == expected, (rank, job.story())


@MORE
def test_a_layer_is_unfrozen_and_a_trainer_dies_behind_the_new_commit(
    made: list[Job], tmp_path: Path
) -> None:
    """Rank 1, which does not grow, moves as well; the restored snapshot is of the new layout."""
    job = growing(tmp_path)
    made.append(job)

    def kill_then_end(job: Job) -> None:
        kill_rank(0)(job)
        job.at_event["trainers_started"] = open_gate

    def renewed(job: Job) -> None:
        job.at_event["committed"] = kill_then_end

    job.at_event["renewed"] = renewed
    job.run()
    check(job)
    ((iteration, source),) = job.restores()
    assert iteration > CHANGE and source == "own memory", job.story()
    assert job.kinds().count("renewed") == 1, job.story()


@pytest.mark.all_layouts
def test_a_trainer_dies_before_the_new_layout_is_committed(made: list[Job], tmp_path: Path) -> None:
    """The snapshot of the old layout is restored, and the change made again."""
    job = growing(tmp_path)
    made.append(job)

    def renewed(job: Job) -> None:
        kill_rank(1)(job)
        job.at_event["renewed"] = once_committed

    job.at_event["renewed"] = renewed
    job.run()
    check(job)
    ((iteration, source),) = job.restores()
    assert source == "own memory", job.story()
    assert job.kinds().count("renewed") >= 1, job.story()


def test_a_list_grows_across_two_restarts(made: list[Job], tmp_path: Path) -> None:
    job = growing(tmp_path, change=1 << 30, values=1000)
    made.append(job)

    def end(job: Job) -> None:
        kill_rank(0)(job)
        job.at_event["trainers_started"] = once_committed

    def second(job: Job) -> None:
        job.at_event["renewed"] = lambda job: job.at_event.update(committed=end)

    def first(job: Job) -> None:
        kill_rank(1)(job)
        job.at_event["trainers_started"] = second

    job.at_event["renewed"] = lambda job: job.at_event.update(committed=first)
    job.run()
    check(job)
    restored = [iteration for iteration, _ in job.restores()]
    assert len(restored) == 2 and restored[1] >= restored[0] > 0, job.story()


@MORE
@pytest.mark.parametrize(("tokens", "every"), [(4096, 1), (1, 100)])
def test_numbers_of_saves_are_learned(
    made: list[Job], tmp_path: Path, tokens: int, every: int
) -> None:
    """Numbers are tokens, or come every 100 iterations: permits meet them, behind a kill too."""
    last = ITERATIONS * every
    words = [program.__file__, "--folder", str(tmp_path), "--iterations", str(last)]
    words += ["--tokens", str(tokens), "--every", str(every)]
    job = Job(tmp_path, nodes=2, block_bytes=BLOCK, command=(sys.executable, *words))
    made.append(job)

    def kill_then_end(job: Job) -> None:
        kill_rank(0)(job)
        job.at_event["trainers_started"] = once_committed

    job.at_event["committed"] = kill_then_end
    job.run()
    for rank in range(2):
        found = json.loads((tmp_path / f"result-{rank}.json").read_text())
        assert found["digest"] == program.expected(rank, 1 << 30, 0, last), (rank, job.story())
    ((number, source),) = job.restores()
    assert number > 0 and number % (tokens * every) == 0 and source == "own memory", job.story()


@MORE
def test_without_room_for_larger_arenas_the_older_ones_stay_and_it_is_tried_again(
    made: list[Job], tmp_path: Path
) -> None:
    """One node makes its larger arena, the other cannot: both take back what they had."""
    job = growing(tmp_path)
    made.append(job)

    def no_room(job: Job) -> None:
        assert job.supervisor.standing.held["n0"], job.story()
        limit_files(job, "n1", resource.RLIM_INFINITY)
        job.at_event["renewed"] = once_committed

    job.at_event["committed"] = lambda job: limit_files(job, "n1", 4096)
    job.at_event["no_room"] = no_room
    job.run()
    check(job)
    assert not job.restores(), job.story()
    (refused,) = [event.text for event in job.events if event.kind == "no_room"]
    assert "its newest snapshot stays" in refused and "n1: " in refused, job.story()
    assert job.kinds().count("renewed") == 1, job.story()
