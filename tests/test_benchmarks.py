"""The benchmarks run, judge rightly, and what they rely on does not depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.memory import capturing, tensors
from benchmarks.table import Row, as_json, markdown

ROOT = Path(__file__).parents[1]
MEBI = 1 << 20


def test_a_limit_is_kept_by_the_median() -> None:
    kept = Row("a", (0.5, 1.0, 9.0), "x", 1.0)
    missed = Row("b", (0.5, 1.0, 9.0), "x", 1.1)
    below = Row("c", (1.0, 2.0), "%", 1.5, more=False)
    reported = Row("d", (1.0,))
    assert [row.met for row in (kept, missed, below, reported)] == [True, False, True, None]
    assert "| b | 1 x | 0.5 to 9 | 3 | ≥ 1.1 x | **no** |  |" in markdown([kept, missed])
    assert [row["met"] for row in json.loads(as_json([kept, reported], "here"))["rows"]] == [
        True,
        None,
    ]


def test_the_table_is_printed_whole(tmp_path: Path) -> None:
    """The smallest run of what takes no job; its limits mean nothing on so little."""
    command = [sys.executable, "-m", "benchmarks", "capture", "coding", "--mib", "16"]
    command += ["--rounds", "1", "--json", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode in (0, 1), ended.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 13 and all(row["median"] > 0 for row in rows)
    assert f"| {rows[0]['name']} |" in ended.stdout


def test_a_capture_takes_no_memory_beside_its_arena() -> None:
    """Nor does it copy more than the state: once, and no byte of it twice."""
    state = tensors(64, 64, "cpu")
    with capturing(state) as captures:
        captures.once()
        process = psutil.Process()
        before = process.memory_full_info().uss
        runs = [captures.once() for _ in range(3)]
        grown = process.memory_full_info().uss - before
    assert [run.copied_bytes for run in runs] == [64 * MEBI] * 3
    assert grown < 2 * MEBI, f"three captures of 64 MiB left {grown} bytes more"
