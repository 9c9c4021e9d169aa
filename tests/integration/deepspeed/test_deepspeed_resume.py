"""DeepSpeed's engine: a run resumed from a snapshot is the uninterrupted run, bit by bit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.support.arena_folder import compared_replicas
from tests.support.deepspeed_cells import CELLS, MORE_CELLS, Cell, zero
from tests.support.deepspeed_runs import Runs
from tests.support.late_capture import SAVE_AT
from tests.support.resume_runs import SNAPSHOT_AT, check_resume

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_resumed_run_is_bit_identical(
    cell: Cell, deepspeed_runs: Runs, pytestconfig: pytest.Config
) -> None:
    check_resume(deepspeed_runs, cell, crash=pytestconfig.getoption("all_layouts"))


@pytest.mark.parametrize("stage", range(4))
def test_replicas_are_compared_where_there_are_any(deepspeed_runs: Runs, stage: int) -> None:
    cell = Cell("compared", 2, zero(stage, "bf16"))
    deepspeed_runs.train(cell, "compared", **{SAVE_AT: SNAPSHOT_AT})
    found = compared_replicas(deepspeed_runs.folder / "compared" / "arenas")
    assert any(name.startswith("model/") for name in found) == (stage < 3), found
    assert any(name.endswith("/exp_avg") for name in found) == (stage < 1), found


@pytest.mark.all_layouts
@pytest.mark.parametrize("cell", MORE_CELLS, ids=lambda cell: cell.name)
def test_so_is_every_other_one(cell: Cell, deepspeed_runs: Runs) -> None:
    check_resume(deepspeed_runs, cell, crash=True)
