"""A job whose trainers cannot come back leaves its last snapshot in the framework's own format."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.chaos.trace import read_trace
from megatron_ft.cli.run_folders import RunSummary
from megatron_ft.core.errors import RestartBudgetError
from megatron_ft.core.startup import before_script
from megatron_ft.supervisor.orders import Timing
from tests.programs.held_in_step import sitecustomize as held
from tests.support.deepspeed_jobs import Program, go_on_alone
from tests.support.jobs import DEEPSPEED_EXAMPLE, Job
from tests.support.megatron_jobs import (
    ITERATIONS,
    RANKS,
    SNAPSHOTS,
    needs_megatron,
    packaged,
    train_alone,
)

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

NEVER = 10_000


def kill_at_every_start(job: Job) -> None:
    job.at_event["trainers_started"] = kill_at_every_start
    if job.kinds().count("trainers_started") > 1:
        kill_a_trainer(job)


def kill_a_trainer(job: Job) -> None:
    os.kill(job.trainers()[int(held.RANK)], signal.SIGKILL)


def fail_thrice(
    made: list[Job], folder: Path, environment: Mapping[str, str], **given: Any
) -> tuple[Job, int]:
    """A job that no restart helps, and the newest iteration that it could go back to.

    Its training is short: rank 1 is held in the middle of it until it is killed.
    """
    job = Job(
        folder,
        environment=before_script(environment, Path(held.__file__).parent),
        drain_dir=folder / "drains",
        drain_interval=NEVER,
        at_event={"trainers_started": kill_at_every_start},
        timing=Timing(lease=30.0, node_timeout=45.0),
        **given,
    )
    made.append(job)
    with pytest.raises(RestartBudgetError, match="rank 1 was killed by signal 9"):
        job.run((held.ITERATION - 1, kill_a_trainer))
    # What all had sealed when the first trainer died is restored, though no commit was told of.
    known = [e.fields["iteration"] for e in job.events if e.kind in ("committed", "restoring")]
    return job, max(known)


@pytest.mark.deepspeed
@pytest.mark.usefixtures("warm_deepspeed_trainers")
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_the_same_failure_thrice_leaves_deepspeeds_own_files(
    made: list[Job], tmp_path: Path
) -> None:
    """No drain was due, so what is on disk came there when no trainer was left."""
    program, exports = Program({"zero_optimization": {"stage": 1}}), tmp_path / "exports"
    job, newest = fail_thrice(
        made,
        tmp_path,
        nodes=2,
        command=(sys.executable, str(DEEPSPEED_EXAMPLE), *program.flags(tmp_path, snapshots=True)),
        environment=program.environment(tmp_path / "trace"),
        drain_export_dir=exports,
    )
    (salvaging,) = (e.text for e in job.events if e.kind == "salvaging")
    assert salvaging.startswith("trainers cannot come back"), job.story()
    last = int((exports / "latest").read_text().removeprefix("global_step"))
    assert last == newest, job.story()
    summary = RunSummary()
    for event in job.events:
        summary(event)
    assert any(str(exports) in line for line in summary.lines())
    assert go_on_alone(program, tmp_path / "later", exports, steps=last + 1) == [last + 1]


@pytest.mark.megatron
@pytest.mark.usefixtures("warm_megatron_trainers")
@pytest.mark.all_layouts
@pytest.mark.timeout(900)
@needs_megatron
def test_the_same_failure_thrice_leaves_megatrons_own_checkpoint(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """Megatron resumes from it without us, to the losses of a run that nothing ended."""
    program = packaged(Path(str(distribution("megatron-core").locate_file(""))))
    trace, exports = tmp_path / "trace", tmp_path / "exports"
    job, newest = fail_thrice(
        made,
        tmp_path,
        nodes=RANKS,
        command=(sys.executable, *program.flags(megatron_corpus, trace), *SNAPSHOTS),
        environment=program.environment(trace),
        drain_export_dir=exports,
    )
    last = int((exports / "latest_checkpointed_iteration.txt").read_text())
    assert last == newest, job.story()
    train_alone(program, megatron_corpus, tmp_path / "later", "--load", str(exports))
    train_alone(program, megatron_corpus, tmp_path / "alone")
    for rank in range(RANKS):
        alone, later = (steps_of(tmp_path / run, rank) for run in ("alone", "later"))
        assert list(later) == list(range(last + 1, ITERATIONS + 1))
        assert later == {at: alone[at] for at in later}


def steps_of(trace: Path, rank: int) -> dict[int, tuple[str | None, list[int]]]:
    """Loss and samples of each iteration."""
    return {line.iteration: (line.loss, line.samples) for line in read_trace(trace, rank)}
