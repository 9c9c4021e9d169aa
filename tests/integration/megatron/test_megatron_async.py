"""Megatron's asynchronous checkpoints beside snapshots, and a kill before one is finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.checkpoint.native import TRACKER, checkpoint_folder, tracked_iteration
from megatron_ft.cli.demo.final_state import compare_runs
from megatron_ft.megatron.own_checkpoints import SAVING_NOTE
from tests.programs.held_in_step import sitecustomize as held
from tests.support.jobs import Job, log_of
from tests.support.megatron_jobs import (
    ITERATIONS,
    LONG_JOB,
    RANKS,
    installed,
    kill_held_rank,
    packaged,
    steps_after,
    survive_a_kill,
    train_alone,
)

pytestmark = [*LONG_JOB, pytest.mark.usefixtures("warm_megatron_trainers")]

# The other strategy, nvidia-resiliency-ext's, has no package for the oldest systems that we test.
ASYNC = ("--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker")
DUE = held.ITERATION - 1
"""The iteration whose checkpoint is begun and, until the kill, not finished."""
# The first snapshot is of this very iteration: nothing before it can be in its way.
SNAPSHOTS = ("--inmem-snapshot", "--inmem-snapshot-interval", str(DUE))


def test_a_kill_before_a_checkpoint_is_finished(megatron_corpus: Path, tmp_path: Path) -> None:
    """Memory serves, the checkpoint is saved once more, and Megatron alone resumes from it."""
    program, own = packaged(installed()), tmp_path / "checkpoints"
    (tmp_path / "job").mkdir()

    def kill_in_between(job: Job) -> None:
        assert checkpoint_folder(own, DUE).is_dir() and tracked_iteration(own / TRACKER) < DUE
        kill_held_rank(job)

    saving = ("--save", str(own), "--save-interval", str(DUE), *ASYNC)
    flags, folder = (*SNAPSHOTS, *saving), tmp_path / "job"
    job = survive_a_kill(
        program, megatron_corpus, folder, flags, fault=kill_in_between, restart="in-process"
    )
    assert job.restores() == [(DUE, "own memory")], job.story()
    assert f"the checkpoint of iteration {DUE} was not finished" in log_of(job, 0)
    assert (own / SAVING_NOTE).read_text() == str(DUE), "not finished when it was begun once more"
    assert tracked_iteration(own / TRACKER) == ITERATIONS
    kept = [event.fields["in_process"] for event in job.events if event.kind == "trainers_started"]
    assert kept == [[], []], "a survivor of a run that saves in background begins anew, too"
    train_alone(program, megatron_corpus, tmp_path / "alone")
    found = compare_runs(tmp_path / "job" / "trace", tmp_path / "alone", RANKS, ITERATIONS)
    assert found.identical, found.differences
    loading = ("--load", str(own), "--ckpt-step", str(DUE))
    train_alone(program, megatron_corpus, tmp_path / "after", *loading)
    for rank in range(RANKS):
        after = steps_after(tmp_path / "after", rank, 0)
        assert list(after) == list(range(DUE + 1, ITERATIONS + 1))
        assert after == steps_after(tmp_path / "alone", rank, DUE)
