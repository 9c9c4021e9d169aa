"""The page of compatibility has what ran, with the versions that are installed and declared."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
RESULTS = """<testsuites><testsuite timestamp="2026-11-26T09:00:00.1+00:00">
<testcase classname="tests.unit.trainer.test_calls" name="a"/>
<testcase classname="tests.integration.deepspeed.test_clients" name="b"><skipped/></testcase>
<testcase classname="tests.integration.deepspeed.test_deepspeed_jobs" name="c"/>
<testcase classname="tests.integration.deepspeed.test_deepspeed_jobs" name="d"><failure/></testcase>
<testcase classname="tests.integration.jobs.test_demo" name="e"><error/></testcase>
<testcase classname="tests.unit.cli.test_cli" name="f"/>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "compatibility_table.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_versions_that_are_installed_are_those_that_were_tested(script: ModuleType) -> None:
    """After another pin scripts/cells.sh must run; test_flags.py compares page and records."""
    text = (ROOT / "requirements" / "constraints.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, re.MULTILINE))
    records = script.read()
    assert pins["torch"] in records
    for release, record in records.items():
        for name, version in record["packages"].items():
            wanted = release if name == "torch" else pins.get(name, version)
            assert version.partition("+")[0] == wanted, f"torch {release} was tested with {name}"


def test_the_page_has_the_pythons_that_the_package_declares(script: ModuleType) -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'requires-python = ">=([\d.]+)"', declared)
    named = re.findall(r"Programming Language :: Python :: (\d\.\d+)", declared)
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| Python |"))
    assert oldest is not None and f"below {oldest[1]} " in row
    assert sorted(set(re.findall(r"\d\.\d+", row))) == sorted(named)
    assert {record["python"].rpartition(".")[0] for record in script.read().values()} <= {*named}


def test_results_count_by_what_they_try_and_how_they_ended(
    script: ModuleType, tmp_path: Path
) -> None:
    results = tmp_path / "results.xml"
    results.write_text(RESULTS)
    found = script.record(results)
    assert found["date"] == "2026-11-26"
    rows = {row[0]: row[1] for row in script.table({"2.0.0": found})}
    assert rows["tests: plain PyTorch"] == "1 passed"
    assert rows["tests: transformers, Accelerate, Lightning"] == "1 skipped"
    assert rows["tests: DeepSpeed"] == "1 passed, 1 failed"
    assert rows["tests: demo"] == "1 failed"
    assert rows["tests: Megatron"] == "-"
    assert sum(sum(counts.values()) for counts in found["tests"].values()) == 5


def test_every_test_that_a_cell_runs_is_there(script: ModuleType) -> None:
    paths = [path for paths in script.GROUPS.values() for path in paths]
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
