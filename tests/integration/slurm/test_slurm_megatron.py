"""Megatron-LM's own loop under the shipped script on a real Slurm: a node is lost.

With MEGATRON_LM_PATH=/path/to/Megatron-LM it is that checkout's ``pretrain_gpt.py``, unedited; else
the program of our tests, which has the same loop.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import distribution
from pathlib import Path

from megatron_ft.cli.demo.final_state import compare_runs
from megatron_ft.core.startup import before_script
from tests.programs.held_in_step import sitecustomize as held
from tests.support import traced_script
from tests.support.megatron_jobs import (
    ITERATIONS,
    LONG_JOB,
    RANKS,
    SNAPSHOTS,
    Program,
    has_reached,
    packaged,
    stock,
    train_alone,
)
from tests.support.slurm_jobs import NEEDS_SLURM, Submit

pytestmark = [*NEEDS_SLURM, *LONG_JOB]


def program() -> Program:
    if traced_script.CHECKOUT in os.environ:
        return stock(traced_script.find_checkout())
    return packaged(Path(str(distribution("megatron-core").locate_file(""))))


def test_megatrons_loop_survives_the_loss_of_a_node(
    submit: Submit, tmp_path: Path, megatron_corpus: Path
) -> None:
    """A rank is held in mid-iteration until its node dies."""
    trained, trace = program(), tmp_path / "trace"
    words = [sys.executable, *trained.flags(megatron_corpus, trace), *SNAPSHOTS]
    environment = before_script(trained.environment(trace), Path(held.__file__).parent)
    job = submit(
        nodes=RANKS + 1,
        spares=1,
        run_flags="--lease-seconds 10",
        site={**environment, "TRAIN": " ".join(words)},
    )
    job.until_printed("committed (protected)")
    before = held.ITERATION - 1
    job.until(f"iteration {before}", lambda: has_reached(trace, before))
    job.end_without("n1")
    assert "n2 takes the place of n1" in job.text() and "from parity" in job.text(), job.story()
    train_alone(trained, megatron_corpus, tmp_path / "alone")
    found = compare_runs(trace, tmp_path / "alone", RANKS, ITERATIONS)
    assert found.identical, found.differences
