#!/usr/bin/env python3
"""Record the tests that ran with a release of torch; the table of all records, in Markdown.

scripts/compatibility_table.py --tests        # prints the tests that scripts/cells.sh runs
scripts/compatibility_table.py RESULTS.XML    # records what pytest wrote, for this environment
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megatron_ft.cli.doctor.as_trainer import versions
from megatron_ft.core.frameworks import version_numbers
from megatron_ft.launchers.mpirun import find_mpi

RECORDS = Path(__file__).parents[1] / "docs" / "reference" / "tested_versions.json"
PACKAGES = (
    "torch", "megatron-core", "deepspeed", "transformers", "accelerate", "lightning", "numpy",
)  # fmt: skip
_DEEPSPEED = "tests/integration/deepspeed"
_MEGATRON = "tests/integration/megatron"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "plain PyTorch": ("tests/unit/trainer", "tests/integration/jobs/test_in_process.py"),
    "FSDP2": ("tests/integration/jobs/test_fsdp2_jobs.py",),
    "Megatron": (
        "tests/unit/megatron",
        *(f"{_MEGATRON}/test_megatron_{name}.py" for name in ("restore", "export", "releases")),
    ),
    "DeepSpeed": (
        "tests/unit/deepspeed_ext",
        *(f"{_DEEPSPEED}/test_deepspeed_{name}.py" for name in ("jobs", "resume", "export")),
    ),
    "transformers, Accelerate, Lightning": tuple(
        f"{_DEEPSPEED}/test_{name}.py" for name in ("clients", "client_jobs", "trainer_client")
    ),
    "demo": ("tests/integration/jobs/test_demo.py",),
}
"""Files and folders of tests by what they try."""
OUTCOMES = ("passed", "failed", "skipped")


def record(results: Path) -> dict[str, Any]:
    """The record of a run of pytest in this environment, from the XML that it wrote.

    It may have run other tests too: those do not count.
    """
    suite = next(ElementTree.parse(results).iter("testsuite"))
    counts = {group: Counter[str]() for group in GROUPS}
    for case in suite.iter("testcase"):
        group = _group(case.get("classname", ""))
        if group is not None:
            counts[group][_outcome(case)] += 1
    mpi = find_mpi()
    return {
        "date": suite.get("timestamp", "").partition("T")[0],
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "mpi": f"{mpi.kind.value} {mpi.version}",
        "tests": {
            group: {name: found[name] for name in OUTCOMES} for group, found in counts.items()
        },
    }


def _group(module: str) -> str | None:
    for group, paths in GROUPS.items():
        for path in paths:
            if f"{module}.".startswith(path.removesuffix(".py").replace("/", ".") + "."):
                return group
    return None


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def table(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the page's table: a column for each release of torch, the newest first."""
    if not records:
        return [("no run is recorded",)]
    columns = [records[name] for name in sorted(records, key=version_numbers, reverse=True)]
    rows = [
        ("", *(f"torch {column['packages']['torch']}" for column in columns)),
        ("date", *(column["date"] for column in columns)),
        ("Python", *(column["python"] for column in columns)),
    ]
    rows += [
        (name, *(column["packages"].get(name, "-") for column in columns)) for name in PACKAGES[1:]
    ]
    rows.append(("MPI", *(column["mpi"] for column in columns)))
    rows += [
        (f"tests: {group}", *(_counts(column["tests"].get(group, {})) for column in columns))
        for group in GROUPS
    ]
    return rows


def _counts(tests: Mapping[str, int]) -> str:
    return ", ".join(f"{tests[name]} {name}" for name in OUTCOMES if tests.get(name)) or "-"


def read() -> dict[str, dict[str, Any]]:
    """All records, by the release of torch."""
    return json.loads(RECORDS.read_text())


def main() -> None:
    """Print the tests, or add a record."""
    if sys.argv[1:] == ["--tests"]:
        print(*dict.fromkeys(path for paths in GROUPS.values() for path in paths), sep="\n")
        return
    new = record(Path(sys.argv[1]))
    release = new["packages"]["torch"].partition("+")[0]
    RECORDS.write_text(json.dumps(read() | {release: new}, indent=2) + "\n")


if __name__ == "__main__":
    main()
