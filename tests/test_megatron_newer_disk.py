"""A job whose checkpoint on disk is newer than its snapshot in memory goes on from disk."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.testing.trace import read_trace
from tests.megatron_jobs import (
    RANKS,
    log_of,
    needs_megatron,
    packaged,
    survive_a_kill,
    train_alone,
)


def _installed() -> Path:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
def test_all_ranks_take_the_newer_checkpoint_and_snapshots_go_on(
    megatron_corpus: Path, tmp_path: Path
) -> None:
    """Killed in iteration 11: memory holds 8 at most, disk 9."""
    program = replace(packaged(_installed()), iterations=40)
    own = str(tmp_path / "checkpoints")
    (tmp_path / "job").mkdir()
    checkpoints = ("--save", own, "--load", own, "--save-interval", "9")
    snapshots = ("--inmem-snapshot", "--inmem-snapshot-interval", "4")
    job = survive_a_kill(program, megatron_corpus, tmp_path / "job", (*snapshots, *checkpoints))
    assert [iteration < 9 for iteration, _ in job.restores()] == [True], job.story()
    assert "starting from disk: the checkpoint of iteration 9 is newer" in log_of(job, 0)
    after = job.kinds()[job.kinds().index("restoring") :]
    assert "committed" in after, job.story()
    train_alone(program, megatron_corpus, tmp_path / "alone")
    for rank in range(RANKS):
        ours, alone = (
            {line.iteration: (line.loss, line.samples) for line in read_trace(folder, rank)}
            for folder in (tmp_path / "job" / "trace", tmp_path / "alone")
        )
        assert list(alone) == list(range(1, program.iterations + 1))
        assert ours == alone
