"""Jobs whose surviving ranks restart in their process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.programs.faulty_example import HANGS
from tests.support.fates import in_incarnation
from tests.support.jobs import FAULTY, Job, Result, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def test_survivors_keep_their_process(made: list[Job], tmp_path: Path, two: Result) -> None:
    job = Job(tmp_path, nodes=2, spares=1)
    made.append(job)
    pids: list[list[int]] = []

    def kill_a_trainer(job: Job) -> None:
        pids.append(job.trainers())
        os.kill(pids[0][1], signal.SIGKILL)

    def lose_a_node(job: Job) -> None:
        pids.append(job.trainers())
        job.cluster.kill_node("n0")

    def look(job: Job) -> None:
        pids.append(job.trainers())

    job.run(
        (8, kill_a_trainer), (18, in_incarnation(2, lose_a_node)), (28, in_incarnation(3, look))
    )
    assert not difference(job.result(), two), job.story()
    first, second, third = pids
    assert first[0] == second[0] and first[1] != second[1], job.story()
    assert second[1] == third[1] and second[0] != third[0], job.story()


def test_a_survivor_that_is_stuck_and_a_rank_with_an_error_of_its_own(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    hangs = {HANGS: "1:c:12:0 2:error:24:1"}
    job = Job(tmp_path, nodes=2, script=FAULTY, environment=hangs)
    made.append(job)
    pids: list[list[int]] = []

    def kill_a_trainer(job: Job) -> None:
        pids.append(job.trainers())
        stuck = Path(f"/proc/{pids[0][0]}/wchan")
        deadline = time.monotonic() + 60.0
        while "pipe_read" not in stuck.read_text():
            assert time.monotonic() < deadline, "rank 0 does not hang in a read of a pipe"
            time.sleep(0.01)
        os.kill(pids[0][1], signal.SIGKILL)

    def look(job: Job) -> None:
        pids.append(job.trainers())

    job.run((10, kill_a_trainer), (20, in_incarnation(2, look)), (30, in_incarnation(3, look)))
    assert not difference(job.result(), two), job.story()
    first, second, third = pids
    assert not set(first) & set(second), "rank 0 held the interpreter and could not let go"
    assert second[0] == third[0] and second[1] != third[1], job.story()


@pytest.mark.all_layouts
def test_a_survivor_that_cannot_be_as_a_new_process_gives_way_to_one(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """It has entered a mode of torch for good; the console says which setting differs."""
    environment = {HANGS: "1:mode:6:0"}
    job = Job(tmp_path, nodes=2, script=FAULTY, environment=environment)
    made.append(job)
    pids: list[list[int]] = []

    def kill_a_trainer(job: Job) -> None:
        pids.append(job.trainers())
        os.kill(pids[0][1], signal.SIGKILL)

    def look(job: Job) -> None:
        pids.append(job.trainers())

    job.run((10, kill_a_trainer), (20, in_incarnation(2, look)))
    assert not difference(job.result(), two), job.story()
    first, second = pids
    assert not set(first) & set(second), job.story()
    assert "torch's function modes" in job.story(), job.story()


def test_an_arena_is_unmapped_when_the_training_function_has_dropped_its_manager(
    made: list[Job], tmp_path: Path
) -> None:
    """An interruption ends the frame that alone has held it; its copy thread maps the arena."""
    job = Job(tmp_path, nodes=2)
    made.append(job)
    training = ("megatron_ft.cli.chaos.training", "--iterations", "40", "--seconds", "0.05")
    job.command = (sys.executable, "-m", *training, "--resilient")
    job.run((8, lambda job: os.kill(job.trainers()[1], signal.SIGKILL)))
    kept = [event.fields["in_process"] for event in job.events if event.kind == "trainers_started"]
    assert kept == [[], [0]], job.story()
