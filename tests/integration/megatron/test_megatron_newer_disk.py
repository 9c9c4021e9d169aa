"""A job whose checkpoint on disk is newer than its snapshot in memory resumes from disk."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.cli.chaos.trace import read_trace
from megatron_ft.core.startup import before_script
from megatron_ft.supervisor.orders import Timing
from tests.programs.held_in_step import sitecustomize as held
from tests.support.jobs import Job
from tests.support.megatron_jobs import (
    RANKS,
    installed,
    needs_megatron,
    packaged,
    survive_a_kill,
    train_alone,
)

pytestmark = pytest.mark.usefixtures("warm_megatron_trainers")


@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
def test_all_ranks_take_the_newer_checkpoint(megatron_corpus: Path, tmp_path: Path) -> None:
    """Killed in iteration 11: memory holds 8 at most, disk 9.

    The supervisor announces memory, and corrects that.
    """
    program = replace(packaged(installed()), iterations=40)
    own = str(tmp_path / "checkpoints")
    (tmp_path / "job").mkdir()
    checkpoints = ("--save", own, "--load", own, "--save-interval", "9")
    snapshots = ("--inmem-snapshot", "--inmem-snapshot-interval", "4")
    folder = tmp_path / "job"
    job = survive_a_kill(program, megatron_corpus, folder, (*snapshots, *checkpoints))
    (announced,) = (event.text for event in job.events if event.kind == "declined")
    assert "the checkpoint of iteration 9" in announced, job.story()
    after = job.kinds()[job.kinds().index("declined") :]
    assert "committed" in after, job.story()
    train_alone(program, megatron_corpus, tmp_path / "alone")
    for rank in range(RANKS):
        ours, alone = (
            {line.iteration: (line.loss, line.samples) for line in read_trace(folder, rank)}
            for folder in (tmp_path / "job" / "trace", tmp_path / "alone")
        )
        assert list(alone) == list(range(1, program.iterations + 1))
        assert ours == alone


@pytest.mark.mpi
@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
def test_a_doubtful_result_is_resumed_from_the_checkpoint_that_knows_of_it(
    megatron_corpus: Path, tmp_path: Path
) -> None:
    """Megatron declares a result doubtful, saves, and exits with 16; memory is as new.

    Its seed injects the error in iteration 3.  Training begins with the permit for iteration 2,
    or a slow machine may have nothing in memory by then.
    """
    program = replace(packaged(installed()), iterations=8)
    own, trace = str(tmp_path / "checkpoints"), tmp_path / "trace"
    flags = [*program.flags(megatron_corpus, trace), "--save", own, "--load", own]
    flags += ["--save-interval", "100", "--inmem-snapshot", "--inmem-snapshot-interval", "2"]
    flags += ["--rerun-mode", "validate_results", "--error-injection-rate", "12"]
    job = Job(
        tmp_path,
        nodes=RANKS,
        protect="none",
        command=(sys.executable, *flags, "--error-injection-type", "correct_result"),
        environment=before_script(program.environment(trace), Path(held.__file__).parent),
        timing=Timing(lease=30.0, node_timeout=45.0),
    )
    job.at_event["declined"] = Job.interrupt
    try:
        with pytest.raises(asyncio.CancelledError):
            job.run()
    finally:
        job.cluster.destroy()
    (end,) = (event for event in job.events if event.kind == "trainer_died")
    (said,) = (event.text for event in job.events if event.kind == "declined")
    committed = [e.fields["iteration"] for e in job.events if e.kind == "committed"]
    assert end.fields["status"] == 16, job.story()
    newest = f"iteration {max(committed)}"
    assert f"{newest} was saved to be resumed from" in said, job.story()
    assert "backoff" not in job.kinds(), "what Megatron saves is progress"
