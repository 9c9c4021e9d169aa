"""The benchmark of restarts: its tables, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restart.runs import Restart, kept
from benchmarks.restart.table import limits, table
from megatron_ft.cli.chaos.trace import TraceLine
from megatron_ft.supervisor.heartbeats import PARTS

ROOT = Path(__file__).parents[2]


def restart(seconds: float | None, **changes: Any) -> Restart:
    parts = dict(zip(PARTS, (0.01, 0.02, 0.1, 0.1, 0.9, 0.2), strict=True))
    usual: dict[str, Any] = {"parts": parts, "starts": {"in process": 3, "warm": 1}, "kept": 3}
    usual |= {"survivors": 3, "imports": 0, "identical": True, **changes}
    return Restart("plain", "trainer", seconds, **usual)


def test_restarts_are_shown_by_fault_and_each_promise_has_a_limit() -> None:
    cold = restart(2.5, starts={"cold": 4}, kept=0, imports=4)
    found = [restart(0.5), restart(0.75), cold, Restart("torchrun", "trainer", 9.0)]
    text = table(found, {"zero1": "not installed"})
    start = "| plain PyTorch | trainer killed | 3 | 0.75 s | 2.50 s | 0.01 | 0.02 | 0.10 | 0.10 | "
    assert f"{start}0.90 | 0.20 | 6 of 9 | 6 in process, 2 warm, 4 cold | 4 | yes |" in text
    assert "| torchrun | trainer killed | 1 | 9.00 s | 9.00 s |" in text
    assert "| zero1 |  | 0 | not installed |" in text
    assert [row.met for row in limits(found)] == [True, True, False, False, True]


def test_a_restart_that_never_was_or_differs_is_missed() -> None:
    found = [restart(None, parts={}, identical=False)]
    assert "| never | never |" in table(found, {}) and "**1 not**" in table(found, {})
    assert [row.met for row in limits(found)] == [None, False, True, True, False]


def test_a_process_is_kept_if_it_trains_in_the_next_incarnation() -> None:
    def lines(*places: tuple[int, int]) -> list[TraceLine]:
        return [TraceLine(inc, n, None, [], 0.0, 0.0, pid) for n, (inc, pid) in enumerate(places)]

    assert kept(lines((1, 7), (2, 7), (3, 9)), 1) and not kept(lines((1, 7), (2, 7), (3, 9)), 2)
    assert not kept(lines((1, 7)), 1) and not kept([], 1)


@pytest.mark.all_layouts
@pytest.mark.mpi
def test_restarts_are_measured(tmp_path: Path) -> None:
    """What the figures are is another question, on a machine that tests keep busy."""
    command = [sys.executable, "-m", "benchmarks", "restart", "--only", "plain", "--seeds", "1"]
    command += ["--only", "torchrun", "--json", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert not found["absent"], ended.stderr
    ours = [one for one in found["restarts"] if one["training"] == "plain"]
    assert [one["fault"] for one in ours] == ["trainer", "node", "trainer and encoder"]
    for one in ours:
        assert one["identical"] and one["imports"] == one["starts"].get("cold", 0)
        assert sum(one["starts"].values()) == 4 and one["kept"] <= one["survivors"]
        # The clock of the job and the traces of its ranks are two witnesses.
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"], abs=0.3)
    assert [one["starts"] for one in found["restarts"][3:]] == [{"cold": 4}]
