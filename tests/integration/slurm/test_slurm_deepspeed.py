"""The DeepSpeed example under the shipped script on a real Slurm: a node is lost."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ft.cli.demo.final_state import compare_runs
from megatron_ft.core.startup import before_script
from tests.programs.held_in_step import sitecustomize as held
from tests.support.deepspeed_jobs import ITERATIONS, Program, train_alone
from tests.support.jobs import DEEPSPEED_EXAMPLE
from tests.support.megatron_jobs import has_reached
from tests.support.slurm_jobs import NEEDS_SLURM, Submit

pytestmark = [
    *NEEDS_SLURM,
    pytest.mark.deepspeed,
    pytest.mark.usefixtures("warm_deepspeed_trainers"),
    pytest.mark.all_layouts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def test_zero_1_survives_the_loss_of_a_node(submit: Submit, tmp_path: Path) -> None:
    """A rank is held in mid-step until its node dies."""
    trained, trace = Program({"zero_optimization": {"stage": 1}}), tmp_path / "trace"
    words = [sys.executable, DEEPSPEED_EXAMPLE, *trained.flags(tmp_path, snapshots=True)]
    environment = before_script(trained.environment(trace), Path(held.__file__).parent)
    job = submit(
        nodes=3,
        spares=1,
        run_flags="--lease-seconds 10",
        site={**environment, "TRAIN": " ".join(map(str, words))},
        script="deepspeed_inmem.sbatch",
    )
    job.until_printed("committed (protected)")
    before = held.ITERATION - 1
    job.until(f"iteration {before}", lambda: has_reached(trace, before))
    job.end_without("n1")
    after = job.text().partition("n2 takes the place of n1")[2]
    assert "pp0-tp0-dp1-ep0 from parity, the rest from own memory" in after, job.story()
    train_alone(trained, tmp_path / "alone", 2)
    found = compare_runs(trace, tmp_path / "alone" / "trace", 2, ITERATIONS)
    assert found.identical, found.differences
