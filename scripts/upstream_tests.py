#!/usr/bin/env python3
"""Run a part of DeepSpeed's own tests with and without our hook, and compare their outcomes.

scripts/upstream_tests.py /path/to/DeepSpeed                     # the files of FILES
scripts/upstream_tests.py /path/to/DeepSpeed checkpoint/test_tag_validation.py

The installed DeepSpeed is tested: of the checkout only the folder tests/ is used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from megatron_ft.core.startup import AFTER_IMPORT, DEEPSPEED, HOOKS, before_script

FILES = (
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_zero_optimizer.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_tensor_fragment.py",
)
"""Below tests/unit of DeepSpeed."""

WAYS: Mapping[str, str] = {
    # Without it DeepSpeed compiles an operator on a CPU, in every test.
    "without": "deepspeed_ext.cpu:prepare",
    "with": HOOKS[DEEPSPEED],
}
"""Ways to run them, and the function that each calls behind the import of DeepSpeed."""

Outcomes = Mapping[str, str]
"""Outcome of each test, by its name."""


def main() -> int:
    """Run each file both ways; 1 if an outcome differs, or no test ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one file")
    given = parser.parse_args()
    print(f"DeepSpeed {version('deepspeed')}, torch {version('torch')}\n")
    print("| file | without the hook | with it | differ |\n| --- | --- | --- | ---: |")
    differences, number = [], 0
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder, "tests")
        shutil.copytree(given.checkout / "tests", tests)
        for file in given.files:
            found = {way: run(tests, file, way, given.timeout) for way in WAYS}
            names = sorted({name for outcomes in found.values() for name in outcomes})
            differ = [n for n in names if len({found[way].get(n, "missing") for way in WAYS}) > 1]
            differences += [f"{file} {n}: {[found[way].get(n) for way in WAYS]}" for n in differ]
            number += len(names)
            shown = " | ".join(summary(found[way]) for way in WAYS)
            print(f"| {file} | {shown} | {len(differ)} |", flush=True)
    print("\n".join(["", f"{number} tests, {len(differences)} differ", *differences]))
    return int(bool(differences) or not number)


def run(tests: Path, file: str, way: str, seconds: float) -> Outcomes:
    """The outcomes of one file; a run that takes longer has none."""
    report, started = tests / "report.xml", time.monotonic()
    report.unlink(missing_ok=True)
    environment = before_script({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", **os.environ})
    environment |= {AFTER_IMPORT: f"{DEEPSPEED}={WAYS[way]}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", f"unit/{file}", f"--junitxml={report}"]
    command += ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with (tests / f"{way}.log").open("a") as log:
        try:
            subprocess.run(
                command, cwd=tests, env=environment, timeout=seconds, stdout=log, stderr=log
            )
        except subprocess.TimeoutExpired:
            print(f"{file} {way} took longer than {seconds:.0f} s", file=sys.stderr)
    print(f"{file} {way}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return read(report) if report.exists() else {}


def read(report: Path) -> Outcomes:
    """The outcome of each test in pytest's report."""
    kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": next(
            (kinds[child.tag] for child in case if child.tag in kinds), "passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


def summary(outcomes: Outcomes) -> str:
    """Numbers of outcomes in words."""
    counted = sorted(Counter(outcomes.values()).items())
    return ", ".join(f"{number} {kind}" for kind, number in counted) or "none ran"


if __name__ == "__main__":
    sys.exit(main())
