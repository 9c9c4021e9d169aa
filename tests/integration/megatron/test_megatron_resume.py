"""Megatron's real loop: a run resumed from a snapshot is the uninterrupted run, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None or find_spec("megatron.training") is None:
    # Looked up, not imported: the test process itself has no stand-in for a device.
    pytest.skip("needs megatron-core with megatron.training", allow_module_level=True)

from megatron_ft.cli.demo import demo_model
from tests.support.arena_folder import compared_replicas
from tests.support.late_capture import SAVE_AT
from tests.support.megatron_layouts import (
    AXES,
    BESIDE,
    DISTRIBUTED,
    MORE,
    MORE_MUON_LAYOUTS,
    MUON_LAYOUTS,
    OVERLAPPED,
    Layout,
    cell,
    matrix,
    pairwise,
)
from tests.support.megatron_programs import MORE_PROGRAMS, PROGRAMS
from tests.support.megatron_runs import SNAPSHOT_AT, SNAPSHOTS, TIMEOUT_SECONDS, Runs, check_resume

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

# Of fp32 there is one: it has no master weights, and otherwise the tensors of bf16.
HALVES = (AXES[0], ("bf16", "fp16"), *AXES[2:])
PAIRWISE = [cell(*values) for values in pairwise(HALVES)]
PAIRWISE += [cell("dp4", "fp32", "overlapped", "distributed")]
REST = [layout for layout in matrix() if layout not in PAIRWISE]


@pytest.mark.parametrize(
    "layout", PAIRWISE + BESIDE + MUON_LAYOUTS + PROGRAMS, ids=lambda layout: layout.name
)
def test_a_resumed_run_is_bit_identical(
    layout: Layout, runs: Runs, pytestconfig: pytest.Config
) -> None:
    if layout.needs:
        pytest.importorskip(layout.needs)
    check_resume(runs, layout, crash=pytestconfig.getoption("all_layouts"))


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    "layout", REST + MORE + MORE_MUON_LAYOUTS + MORE_PROGRAMS, ids=lambda layout: layout.name
)
def test_so_is_every_other_one(layout: Layout, runs: Runs) -> None:
    if layout.needs:
        pytest.importorskip(layout.needs)
    check_resume(runs, layout, crash=True)


def test_snapshots_do_not_change_training(runs: Runs) -> None:
    layout = Layout("dp2", 2, DISTRIBUTED)
    runs.train(layout, "plain")
    runs.train(layout, "with", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    runs.require_same(layout, "plain", "with")


def test_hidden_tensors_are_refused(runs: Runs) -> None:
    plugins = ("tests.programs.megatron_plugins:hide_tensors",)
    layout = Layout("hidden", 1, DISTRIBUTED, "none", nodes_lost=(), plugins=plugins)
    runs.train(layout, "hidden", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})


@pytest.mark.parametrize(
    ("name", "flags", "weights", "moments"),
    [
        ("distributed", DISTRIBUTED, True, False),
        ("replicated", ("--bf16",), True, True),
        ("gathered-late", (*DISTRIBUTED, *OVERLAPPED), False, False),
    ],
)
def test_replicas_are_compared_where_there_are_any(
    runs: Runs, name: str, flags: tuple[str, ...], weights: bool, moments: bool
) -> None:
    runs.train(Layout(name, 2, flags), name, SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    found = compared_replicas(runs.folder / name / "arenas")
    assert any(one.startswith("chunk0.") for one in found) == weights, found
    assert any(one.endswith(".exp_avg_sq") for one in found) == moments, found
    assert any(one.endswith(".main") for one in found) == moments, found


@pytest.mark.all_layouts
def test_a_rank_of_a_launcher_trains_the_same(runs: Runs) -> None:
    """What the forked ranks of the other tests show holds for torchrun's processes."""
    layout = Layout("dp2", 2, DISTRIBUTED)
    runs.train(layout, "forked", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    request = runs.request(layout, "launched", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = Path(__file__).parents[2] / "programs" / "megatron_program.py"
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(layout.ranks), str(program), *request.argv],
        env=os.environ
        | demo_model.ENVIRONMENT
        | request.environment
        | {"PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    runs.require_same(layout, "forked", "launched")
