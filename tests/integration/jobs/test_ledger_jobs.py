"""The ledger of real jobs, against what is known of them: faults, iterations, the test's clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ft.supervisor.event_log import EVENTS, read_events
from megatron_ft.supervisor.ledger import CATEGORIES, Ledger, ledger
from tests.support.fates import in_incarnation
from tests.support.jobs import ROOT, Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS, SECONDS = 40, 0.15


def ledger_of(job: Job) -> Ledger:
    return ledger(read_events(job.folder / EVENTS).events)


def kill(job: Job) -> None:
    os.kill(job.trainers()[1], signal.SIGKILL)


def lose(job: Job) -> None:
    job.cluster.kill_node("n0")


def output_of(command: list[str]) -> str:
    return subprocess.check_output(command, cwd=ROOT, timeout=60, text=True)


def test_two_faults_and_every_second_between(made: list[Job], tmp_path: Path) -> None:
    """The example sleeps in each iteration, so that much time at least is training."""
    shape = {"iterations": ITERATIONS, "iteration_seconds": SECONDS}
    job = Job(tmp_path, nodes=2, spares=1, protect="xor:2", **shape)
    made.append(job)
    began = time.monotonic()
    job.run((8, kill), (20, in_incarnation(2, lose)))
    wall = time.monotonic() - began
    found = ledger_of(job)
    assert found.wall == pytest.approx(wall, abs=1.0), job.story()
    assert sum(found.seconds().values()) == pytest.approx(found.wall, rel=0.001)
    assert [one.kind for one in found.incidents] == ["signal", "node loss"], job.story()
    recovered = [e.fields["total"] for e in job.events if e.kind == "recovered"]
    lost = [e.fields["iterations_lost"] for e in job.events if e.kind == "restoring"]
    for one, total, iterations in zip(found.incidents, recovered, lost, strict=True):
        # A recovery ends with the first iteration, which is training here.
        assert one.down == pytest.approx(total, abs=2 * SECONDS + 0.5), job.story()
        assert one.lost == iterations
    spent = found.seconds()
    assert spent["redone"] == pytest.approx(sum(lost) * SECONDS, abs=1.5 + sum(lost) * SECONDS)
    # An independent account: each iteration once, at what the script takes for one.
    assert spent["productive"] >= ITERATIONS * SECONDS - 0.5
    idle = wall - sum(recovered) - spent["start"]
    assert found.ettr * found.wall == pytest.approx(idle, abs=0.25 * wall), job.story()


@pytest.mark.all_layouts
def test_a_supervisor_that_dies_leaves_a_ledger_with_a_gap(made: list[Job], tmp_path: Path) -> None:
    """As a user sees it: the command is run again, and then ``megatron-ft ledger``."""
    job = Job(tmp_path, nodes=1, protect="none", iterations=30, iteration_seconds=0.2)
    made.append(job)
    program = [sys.executable, "-m", "megatron_ft.cli.main"]
    where = ["--job", job.name, "--state-dir", str(tmp_path / "state")]
    flags = ["--nodes", "1", "--protect", "none", "--lease-seconds", "3"]
    command = [*program, "run", *where, *flags, "--", *job.training_command()]
    path = tmp_path / "state" / job.name / EVENTS
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 60
        while not any(e.kind == "committed" for e in read_events(path).events):
            assert time.monotonic() < deadline, "no snapshot was committed in 60 s"
            time.sleep(0.1)
        first.kill()
    killed = time.monotonic()
    time.sleep(1.0)
    subprocess.run(command, cwd=ROOT, check=True, timeout=100, stdout=subprocess.DEVNULL)
    made_of = [*program, "ledger", *where]
    shown = output_of(made_of)
    assert "no supervisor ran" in shown and "(ETTR)" in shown
    found = json.loads(output_of([*made_of, "--json"]))
    assert found["seconds"].keys() == CATEGORIES.keys()
    assert 1.0 <= found["seconds"]["queue"] < time.monotonic() - killed
    assert sum(found["seconds"].values()) == pytest.approx(found["wall"], rel=0.01)
    assert found["seconds"]["productive"] >= 30 * 0.2 - 1
