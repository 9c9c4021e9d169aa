"""Nodes that are to leave a running job: their ranks move to a spare, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_ft.cli import status
from megatron_ft.cli.main import main
from megatron_ft.smp.node_folder import PID_NAME
from tests.support.disk_jobs import of_kind, wait_for
from tests.support.jobs import Job, Uninterrupted, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS = 160
PACE = 0.08
"""Training lasts longer than the moves, also on a busy machine."""


def evacuate(job: Job, node: str, *more: str) -> int:
    words = ["--job", job.name, "--arena-dir", str(job.cluster.root), "--wait-seconds", "60"]
    return main(["evacuate", node, *words, *more])


def lose_spare(job: Job) -> None:
    job.cluster.kill_node("n2")


def done(job: Job) -> list[int]:
    """Every iteration that rank 0 has done, as often as it did it."""
    entries = map(json.loads, job.losses.read_text().splitlines())
    return [entry["iteration"] for entry in entries if "iteration" in entry]


def test_ranks_move_to_a_spare_and_no_iteration_is_done_twice(
    made: list[Job],
    tmp_path: Path,
    uninterrupted: Uninterrupted,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By command, refused without a spare; then by SIGTERM to the SMP of the other node."""
    job = Job(tmp_path, nodes=2, spares=1, iterations=ITERATIONS, iteration_seconds=PACE)
    made.append(job)

    def move_both(job: Job) -> None:
        assert evacuate(job, "n1") == 0, job.story()
        assert "n2 has its ranks, 0 iterations are lost" in capsys.readouterr().out
        shown = status.collect(job.cluster.root, job.name)[job.name]
        assert "n1         (evacuated)" in status.render(job.name, shown)
        assert evacuate(job, "n1", "--undo") == 0
        os.kill(int((job.cluster.node_dir("n0") / PID_NAME).read_text()), signal.SIGTERM)
        wait_for(job, "evacuated", 2)
        wait_for(job, "training", 3)
        assert evacuate(job, "n1") == 1, job.story()
        assert "n1 is not evacuated: no spare is left" in capsys.readouterr().out

    job.run((6, move_both))
    assert [place for _, place in job.restores()] == ["parity", "parity"], job.story()
    assert [e.fields["iterations_lost"] for e in of_kind(job, "restoring")] == [0, 0]
    assert job.supervisor.members.active == ["n1", "n2"], job.story()
    assert done(job) == list(range(1, ITERATIONS + 1)), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.parametrize(
    "when", [pytest.param("evacuating", marks=pytest.mark.all_layouts), "spare"]
)
@pytest.mark.all_layouts
def test_a_node_trains_on_when_its_spare_is_lost_during_the_move(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted, when: str
) -> None:
    """Before the incarnation ends, or after the spare has taken the place."""
    job = Job(tmp_path, nodes=2, spares=1, iterations=ITERATIONS, iteration_seconds=PACE)
    made.append(job)
    job.at_event[when] = lose_spare

    def move(job: Job) -> None:
        assert evacuate(job, "n1") == 1, job.story()

    job.run((6, move))
    assert job.supervisor.members.active == ["n0", "n1"], job.story()
    (refused,) = of_kind(job, "not_evacuated")
    assert "spare" in refused.text and "training continues" in refused.text
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
