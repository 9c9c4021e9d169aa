"""What is kept of the cases of a table, and what a continued run leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ft.cli.chaos import command, report
from megatron_ft.cli.chaos.cases import Case, table
from megatron_ft.cli.chaos.report import FAILED, CaseRestore, CaseResult
from megatron_ft.cli.chaos.runner import ChaosSettings
from megatron_ft.core.errors import ConfigError

CASES = table(2, 1, every_process=True)


def result(case: Case, said: str = "parity", day: str = "2026-01-02") -> CaseResult:
    restored = (CaseRestore(12, 10, "parity"),)
    return CaseResult(str(case), day, said, (), ("SIGKILL",), restored, 72, True, 2.5)


@pytest.fixture
def settings(tmp_path: Path) -> ChaosSettings:
    return ChaosSettings(tmp_path)


def test_what_is_kept_is_read_again(settings: ChaosSettings, tmp_path: Path) -> None:
    kept = [result(case) for case in CASES[:5]]
    path = tmp_path / "results.json"
    assert report.read(path, settings) == []
    report.write(path, kept, settings)
    assert report.read(path, settings) == kept


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"nodes": 3}, {"protect": "rs:2+1"}, {"command": ("train",)}]
)
def test_results_of_other_settings_are_refused(
    settings: ChaosSettings, tmp_path: Path, other: dict[str, object]
) -> None:
    path = tmp_path / "results.json"
    report.write(path, [], settings)
    with pytest.raises(ConfigError, match="give the same flags, or another --json"):
        report.read(path, replace(settings, **other))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"setting": {}, "cases": [{}]}'])
def test_a_file_of_something_else_is_refused(
    settings: ChaosSettings, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no results"):
        report.read(path, settings)


def test_only_what_has_passed_is_left_out(settings: ChaosSettings, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    passed, failed, unwanted = CASES[1], CASES[2], CASES[9]
    known = [result(passed), result(failed, FAILED), result(unwanted)]
    report.write(path, known, settings)
    arguments = SimpleNamespace(go_on=True, json=path)
    assert command._kept(arguments, CASES[:4], settings) == [result(passed)]
    arguments.go_on = False
    assert command._kept(arguments, CASES[:4], settings) == []


def test_to_go_on_needs_a_file(settings: ChaosSettings) -> None:
    with pytest.raises(ConfigError, match="give --json FILE"):
        command._kept(SimpleNamespace(go_on=True, json=None), CASES, settings)


def test_the_table_has_every_case_once_and_says_when(settings: ChaosSettings) -> None:
    results = [result(case) for case in CASES[:-1]]
    last = result(CASES[-1], FAILED, "2026-01-04")
    text = report.markdown([*results, last], settings)
    assert f"{len(CASES)} cases, 1 failed; {len(CASES)} restores" in text
    assert "2026-01-02 to 2026-01-04, 2 nodes" in text
    assert text.count("parity |") == len(CASES) - 1 and text.count("**FAILED** |") == 1
