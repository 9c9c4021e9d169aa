"""The benchmark of reshapes runs, checks what was loaded, and says what is in each figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.reshape.measure import Checkpointed, Reshaped, report
from benchmarks.reshape.rank import Plan, build, require_right

ROOT = Path(__file__).parents[2]


def test_ratios_are_of_one_round_and_say_which_starts_are_in_them() -> None:
    theirs = [Checkpointed(1.0, 6.0, 3.0), Checkpointed(2.0, 12.0, 6.0), Checkpointed(1, 7, 1)]
    ours = [Reshaped(0.5, 1.0, 5.0), Reshaped(1.5, 2.0, 8.0), Reshaped(0.5, 1.0, 6.0)]
    rows = {row.name: row for row in report(theirs, ours, "x")}
    whole = rows["DCP's save, start and load over the reshape"]
    assert (whole.samples, whole.limit, whole.met) == ((10.0, 10.0, 9.0), 10.0, True)
    assert rows["DCP's save and load over the reshape"].samples == (4.0, 4.0, 2.0)
    assert rows["DCP's save, start and load over all from the loss"].samples == (2.0, 2.5, 1.5)
    assert rows["of it: memory of arenas made, tensors loaded"].samples == (0.5, 0.5, 0.5)


def test_what_was_loaded_wrongly_gives_no_figures() -> None:
    plan = Plan("dcp", "", mib=1, savers=4, tensors=3)
    for rank in (0, 2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        try:
            mesh = init_device_mesh("cpu", (3,))
            require_right(plan, state := build(plan, mesh, saved=True))
            assert state["w0"].shape == (plan.rows, 1024)
            state["w2"].to_local()[-1, 7] += 1
            with pytest.raises(RuntimeError, match="w2 was not loaded as it was saved"):
                require_right(plan, state)
            with pytest.raises(RuntimeError, match="w0 was not"):
                require_right(plan, build(plan, mesh, saved=False))
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.all_layouts
@pytest.mark.slow
def test_a_small_state_is_reshaped_both_ways(tmp_path: Path) -> None:
    """All values that are loaded are compared; the limit means nothing on so little."""
    command = [sys.executable, "-m", "benchmarks", "reshape", "--mib", "2", "--rounds", "1"]
    command += ["--json", str(tmp_path / "rows.json"), "--job-seconds", "120"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert not found["failed"] and len(found["rows"]) == 10, ended.stderr
    assert all(row["median"] > 0 for row in found["rows"])
