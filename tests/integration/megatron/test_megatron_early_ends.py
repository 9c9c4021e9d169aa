"""Megatron's own ways out of its loop before the last iteration: the job continues afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.outcome import Outcome
from tests.support.jobs import Job
from tests.support.megatron_jobs import ITERATIONS, SNAPSHOTS, installed, needs_megatron, packaged

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.megatron,
    pytest.mark.usefixtures("warm_megatron_trainers"),
    needs_megatron,
]


EXIT = 12
"""Behind half of the plan: a busy machine has committed a snapshot by then."""


def train(job: Job, corpus: Path, *flags: str) -> Outcome:
    """One start of the job to its end."""
    training = packaged(installed())
    trace = job.folder / "trace"
    job.command = (sys.executable, *training.flags(corpus, trace), *SNAPSHOTS, *flags)
    job.environment = training.environment(trace)
    job.run()
    return job.end


def test_an_exit_interval_is_no_end(made: list[Job], tmp_path: Path, megatron_corpus: Path) -> None:
    job = Job(tmp_path, nodes=2, timing=Timing(lease=30.0, node_timeout=45.0))
    made.append(job)
    assert train(job, megatron_corpus, "--exit-interval", str(EXIT)) is Outcome.EARLY, job.story()
    # Its plan ends with an iteration at which it would exit as well.
    again = train(job, megatron_corpus, "--exit-interval", str(ITERATIONS))
    assert again is Outcome.FINISHED, job.story()
    assert 2 <= job.restores()[-1][0] <= EXIT, job.story()
    assert not any(job.cluster.job_dir.glob("*/*.arena")), job.story()
