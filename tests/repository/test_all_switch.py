"""The one switch for tests that CI leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

def test_always(pytestconfig):
    print("whole matrix:", pytestconfig.getoption("all_layouts"))

@pytest.mark.all_layouts
def test_long():
    pass
"""


@pytest.mark.parametrize(("switches", "passed"), [([], 1), (["--all"], 2)])
def test_what_ci_leaves_out_runs_with_the_switch(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, switches: list[str], passed: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-s", "-W", "ignore", *switches)
    result.assert_outcomes(passed=passed, deselected=2 - passed)
    result.stdout.fnmatch_lines([f"*whole matrix: {bool(switches)}*"])
