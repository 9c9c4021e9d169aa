"""Pipelines, tensor and expert parallelism, ZeRO-3: resumed runs are the uninterrupted run."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.programs.deepspeed_program import CHECKPOINT, SAVE_CHECKPOINT, STEPS
from tests.support.arena_folder import ArenaFolder
from tests.support.deepspeed_cells import Cell
from tests.support.deepspeed_cells_parallel import (
    MORE_PARALLEL_CELLS,
    PARALLEL_CELLS,
    UNIVERSAL_CELLS,
)
from tests.support.deepspeed_runs import Runs
from tests.support.late_capture import LOAD_FROM, SAVE_AT
from tests.support.resume_runs import ITERATIONS, SNAPSHOT_AT, TIMEOUT_SECONDS, check_resume
from tests.support.warm_host import Request

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]


@pytest.mark.parametrize("cell", PARALLEL_CELLS, ids=lambda cell: cell.name)
def test_a_resumed_run_is_bit_identical(cell: Cell, deepspeed_runs: Runs) -> None:
    check_resume(deepspeed_runs, cell, crash=cell.scheme == "none")


@pytest.mark.all_layouts
@pytest.mark.parametrize("cell", MORE_PARALLEL_CELLS, ids=lambda cell: cell.name)
def test_so_is_every_other_one(cell: Cell, deepspeed_runs: Runs) -> None:
    check_resume(deepspeed_runs, cell, crash=True)


@pytest.mark.all_layouts
@pytest.mark.parametrize("cell", UNIVERSAL_CELLS, ids=lambda cell: cell.name)
def test_a_job_from_a_universal_checkpoint_resumes(cell: Cell, deepspeed_runs: Runs) -> None:
    """Under ZeRO-3 DeepSpeed's load makes sub-groups share their step, which has to stay so."""
    runs, folder = deepspeed_runs, deepspeed_runs.folder / "checkpoint"
    runs.train(cell, "earlier", **{SAVE_CHECKPOINT: folder, STEPS: 2})
    convert(runs, folder / "global_step2", folder / "universal")
    cell = replace(cell, config={**cell.config, "checkpoint": {"load_universal": True}})
    runs.train(cell, "whole", **{CHECKPOINT: folder, SAVE_AT: SNAPSHOT_AT})
    arenas = ArenaFolder.of(runs.folder / "whole" / "arenas").folder
    after = runs.train(cell, "crash", **{CHECKPOINT: folder, LOAD_FROM: arenas})
    assert f"restored iteration {SNAPSHOT_AT} " in after.output(0)
    assert list(runs.lines("whole", 0)) == list(range(3, ITERATIONS + 1))
    runs.require_same(cell, "whole", "crash", after=SNAPSHOT_AT)


def convert(runs: Runs, source: Path, target: Path) -> None:
    """What ds_to_universal makes of a checkpoint."""
    flags = ["--input_folder", str(source), "--output_folder", str(target)]
    request = Request(
        entry="tests.programs.deepspeed_program:convert",
        argv=[*flags, "--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"],
        ranks=1,
        logs=str(runs.folder / "convert"),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    outcome = runs.server.run(request)
    assert not any(outcome.codes), outcome.story()
