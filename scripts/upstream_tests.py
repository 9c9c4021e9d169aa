#!/usr/bin/env python3
"""Run own tests of DeepSpeed or Accelerate with and without our part, and compare their outcomes.

scripts/upstream_tests.py /path/to/DeepSpeed                     # the files of PROJECTS
scripts/upstream_tests.py /path/to/DeepSpeed checkpoint/test_tag_validation.py
scripts/upstream_tests.py --project accelerate /path/to/accelerate

The installed release is tested: of the checkout only the folder tests/ is used.  Accelerate's tests
need the package parameterized.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet
from xml.etree import ElementTree

from megatron_ft.core.startup import AFTER_IMPORT, DEEPSPEED, HOOKS, before_script


@dataclass(frozen=True)
class Project:
    """A library: the folder of its test files, those that a CPU can run, and our hooks.

    A hook is a function that is called behind the import of a module.
    """

    folder: str
    files: tuple[str, ...]
    hooks: Mapping[str, str]


PROJECTS = {
    "deepspeed": Project(
        "tests/unit",
        (
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
        ),
        {DEEPSPEED: HOOKS[DEEPSPEED]},
    ),
    "accelerate": Project(
        "tests",
        (
            "test_state_checkpointing.py",
            "test_optimizer.py",
            "test_scheduler.py",
            "test_accelerator.py",
        ),
        {DEEPSPEED: HOOKS[DEEPSPEED], "accelerate": "upstream_tests:follow_accelerators"},
    ),
}

WITHOUT = {DEEPSPEED: "upstream_tests:leave_out_operator"}
"""Without it DeepSpeed compiles an operator on a CPU, in every test."""

Outcomes = Mapping[str, str]
"""Outcome of each test, by its name."""


def main() -> int:
    """Run each file both ways; 1 if an outcome differs, or no test ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--project", choices=PROJECTS, default="deepspeed")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one file")
    given = parser.parse_args()
    project = PROJECTS[given.project]
    ways = {"without": WITHOUT, "with": project.hooks}
    print(f"{given.project} {version(given.project)}, torch {version('torch')}\n")
    print("| file | without the hook | with it | differ |\n| --- | --- | --- | ---: |")
    differences, number = [], 0
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(given.checkout / "tests", Path(folder, "tests"))
        for file in given.files or project.files:
            path = Path(folder, project.folder, file)
            found = {way: run(path, hooks, way, given.timeout) for way, hooks in ways.items()}
            names = sorted({name for outcomes in found.values() for name in outcomes})
            differ = [n for n in names if len({found[way].get(n, "missing") for way in ways}) > 1]
            differences += [f"{file} {n}: {[found[way].get(n) for way in ways]}" for n in differ]
            number += len(names)
            shown = " | ".join(summary(found[way]) for way in ways)
            print(f"| {file} | {shown} | {len(differ)} |", flush=True)
    print("\n".join(["", f"{number} tests, {len(differences)} differ", *differences]))
    return int(bool(differences) or not number)


def run(file: Path, hooks: Mapping[str, str], way: str, seconds: float) -> Outcomes:
    """The outcomes of one file; a run that takes longer has none."""
    tests = next(folder for folder in file.parents if folder.name == "tests")
    report, started = tests / "report.xml", time.monotonic()
    report.unlink(missing_ok=True)
    environment = before_script({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", **os.environ})
    environment[AFTER_IMPORT] = ",".join(f"{module}={hook}" for module, hook in hooks.items())
    environment["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent.resolve()}"
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "pytest", str(file), f"--junitxml={report}"]
    command += ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "upstream_tests"]
    with (tests / f"{way}.log").open("a") as log:
        try:
            subprocess.run(
                command, cwd=tests, env=environment, timeout=seconds, stdout=log, stderr=log
            )
        except subprocess.TimeoutExpired:
            print(f"{file.name} {way} took longer than {seconds:.0f} s", file=sys.stderr)
    print(f"{file.name} {way}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return read(report) if report.exists() else {}


def pytest_configure() -> None:
    """Have the server that forks the workers of all tests import, once, what they need.

    Each worker would take seconds for each of these.  DeepSpeed is imported with its hook, and any
    optimizer imports the compiler.
    """
    multiprocessing.set_forkserver_preload([DEEPSPEED, "torch._dynamo", "upstream_operators"])


def pytest_collection_finish() -> None:
    """Refuse a run whose process has the hook without being asked for it, or lacks it."""
    if DEEPSPEED in sys.modules:
        asked = HOOKS[DEEPSPEED] in os.environ[AFTER_IMPORT]
        assert ("deepspeed_ext" in sys.modules) == asked, f"deepspeed_ext, asked for: {asked}"


def leave_out_operator() -> None:
    """Have DeepSpeed do without an operator, as deepspeed_ext.hooks.prepare_cpu does.

    Importing that module would install our hook.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def read(report: Path) -> Outcomes:
    """The outcome of each test in pytest's report."""
    kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": next(
            (kinds[child.tag] for child in case if child.tag in kinds), "passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


def follow_accelerators() -> None:
    """Have every Accelerator of this process make an InMemoryState behind its first ``prepare``.

    It follows loaders and steps, and registers its own object; nothing is captured.
    """
    from accelerate import Accelerator

    from megatron_ft.trainer.accelerator_state import InMemoryState, unsupported

    prepare = Accelerator.prepare
    manager: Any = SimpleNamespace(register_fence=id)
    followed: WeakSet[Any] = WeakSet()

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs)
        if self not in followed and not unsupported(self):
            followed.add(self)
            InMemoryState(self, manager=manager)
        return result

    Accelerator.prepare = prepared


def summary(outcomes: Outcomes) -> str:
    """Numbers of outcomes in words."""
    counted = sorted(Counter(outcomes.values()).items())
    return ", ".join(f"{number} {kind}" for kind, number in counted) or "none ran"


if __name__ == "__main__":
    sys.exit(main())
