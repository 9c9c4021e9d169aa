"""The rows about save() count the calls that capture, of real training under each framework."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.bookkeeping import CAPTURES, DEEPSPEED, MEGATRON, PLAIN, Program, measured
from benchmarks.capturing import SHARED_MEMORY
from benchmarks.frameworks.save_calls import WARM_UP, SaveCalls
from benchmarks.jobs import Jobs
from megatron_ft.trainer.manager import SnapshotManager
from tests.support.captures import FakeSmp, capture, make_manager


def needs(program: Program) -> pytest.MarkDecorator:
    reason = f"needs {program.distribution}"
    return pytest.mark.skipif(not program.installed, reason=reason)


@pytest.mark.all_layouts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "tensors"),
    [
        pytest.param(PLAIN, "2,016", id="plain"),
        pytest.param(
            DEEPSPEED,
            "2,016",
            marks=[pytest.mark.deepspeed, needs(DEEPSPEED)],
            id="deepspeed",
        ),
        pytest.param(
            MEGATRON,
            "1,936",
            marks=[pytest.mark.megatron, needs(MEGATRON)],
            id="megatron",
        ),
    ],
)
def test_each_program_is_a_whole_job(program: Program, tensors: str) -> None:
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        (row,) = measured(program, Jobs(1, "cpu", Path(folder), 240.0))
        assert not os.listdir(folder)
    assert row.note.startswith(f"{tensors} tensors; ")
    assert len(row.samples) >= CAPTURES and min(row.samples) > 0
    assert (row.unit, row.limit, row.more) == ("ms", 5.0, False)


def test_a_framework_that_is_not_installed_is_said_to_be_so(tmp_path: Path) -> None:
    absent = Program("absent_loop", "save() of none", "absent-core", "absent.training")
    assert not absent.installed
    (row,) = measured(absent, Jobs(7, "cpu", tmp_path, 60.0))
    assert (row.samples, row.met) == ((), None)
    assert row.note == "not measured: no absent-core is installed"


def test_calls_that_capture_nothing_do_not_count(
    smp: FakeSmp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotManager, "save", SnapshotManager.save)  # wrapped for this test only
    calls, state = SaveCalls(captures=2), {"weight": torch.ones(8), "bias": torch.ones(2)}
    manager = make_manager(smp)
    for captured in range(WARM_UP + 2):
        assert not calls.enough and len(calls.seconds) == captured
        assert manager.save(2 * captured, state).skipped
        assert not capture(smp, manager, state, 2 * captured + 1, captured % 2).skipped
    assert calls.enough
    manager.close()
    calls.write(tmp_path / "out.json", "a test")
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "note": "2 tensors; a test",
        "seconds": calls.seconds[WARM_UP:],
    }
