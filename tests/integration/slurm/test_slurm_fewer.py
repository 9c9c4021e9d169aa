"""No spare is left on a real Slurm: Megatron's loop continues with fewer nodes."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from megatron_ft.core.startup import before_script
from tests.programs.held_in_step import sitecustomize as held
from tests.support.megatron_fewer import NO_DROPOUT
from tests.support.megatron_jobs import LONG_JOB, check_fewer_ranks, has_reached, packaged
from tests.support.slurm_jobs import NEEDS_SLURM, Submit

pytestmark = [*NEEDS_SLURM, *LONG_JOB]


def test_megatrons_loop_goes_on_with_two_of_four_nodes(
    submit: Submit, tmp_path: Path, megatron_corpus: Path
) -> None:
    """A rank is held in mid-iteration until another node dies."""
    program = packaged(Path(str(distribution("megatron-core").locate_file(""))))
    trace = tmp_path / "trace"
    words = [sys.executable, *program.flags(megatron_corpus, trace), *NO_DROPOUT]
    environment = before_script(program.environment(trace), Path(held.__file__).parent)
    job = submit(
        nodes=4,
        run_flags="--lease-seconds 10",
        site={
            **environment,
            "ON_NO_SPARE": "shrink",
            "TRAIN": " ".join([*words, "--inmem-snapshot"]),
        },
    )
    job.until_printed("committed (protected)")
    before = held.ITERATION - 1
    job.until(f"iteration {before}", lambda: has_reached(trace, before))
    job.end_without("n3")
    said = job.text()
    assert "continuing with 2 nodes instead of 4, 2 ranks: n0, n1" in said, job.story()
    reshaped = re.search(r"iteration (\d+): 4 shards reshaped to 2", said)
    assert reshaped is not None, job.story()
    check_fewer_ranks(program, megatron_corpus, tmp_path, int(reshaped.group(1)), *NO_DROPOUT)
