"""Starts that cannot succeed: one, with one cause, and nothing of the job remains."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB
from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import ROOT

SECONDS = 150.0
END_SECONDS = 20.0
NAME = f"vain-{os.getpid()}"
REGISTER = """
import torch
from megatron_ft import SnapshotManager
manager = SnapshotManager()
"""
CASES = {
    "module": ("import no_such_module", 12, "No module named 'no_such_module'"),
    "syntax": ("def broken(:", 12, "SyntaxError"),
    "flags": ("import argparse\nargparse.ArgumentParser().parse_args()", 12, "unrecognized"),
    "refusal": (
        "from megatron_ft.core.errors import ConfigError\nraise ConfigError('it cannot be')",
        12,
        "it cannot be",
    ),
    "number": (REGISTER + "manager.save(0.5, {'w': torch.ones(1)})", 12, "got 0.5"),
    "state": (
        REGISTER + "manager.save(1, {'w': torch.ones(1), 'o': object()})",
        2,
        "snapshots cannot hold o",
    ),
}
"""The script, the exit code of the job, and its cause on the console."""


def run(
    folder: Path, *command: str, warm: str = "off", environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """A job of one node on this machine; exit code and console."""
    words = [sys.executable, "-m", "megatron_ft", "run", "--job", NAME]
    words += ["--nodes", "1", "--protect", "none", "--warm-start", warm]
    words += ["--state-dir", str(folder / "state"), "--", *command]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout.decode(errors="replace")


def check_once(code: int, console: str, expected: int, cause: str) -> None:
    """One start, the cause, no advice that does not fit, no daemon and no folder."""
    assert code == expected, console
    assert console.count("trainers started") == 1 and cause in console, console
    assert "no rank asked for snapshots" not in console, console
    assert "stay in memory" not in console, console
    assert not (default_root() / NAME).exists(), console
    # A daemon that was told to end may still be about to.
    deadline = time.monotonic() + END_SECONDS
    while left := [
        p for p in procfs.own_processes() if procfs.read_environment(p).get(JOB) == NAME
    ]:
        assert time.monotonic() < deadline, f"processes of the job did not end: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("name", CASES)
def test_a_script_that_cannot_train_is_started_once(tmp_path: Path, name: str) -> None:
    script, expected, cause = CASES[name]
    program = tmp_path / "train.py"
    program.write_text(script)
    command = [sys.executable, program.name, *(["--no-such-flag"] if name == "flags" else [])]
    check_once(*run(tmp_path, *command), expected, cause)


def test_a_module_that_is_missing_is_looked_for_once(tmp_path: Path) -> None:
    outcome = run(tmp_path, sys.executable, "-m", "no_such_module")
    check_once(*outcome, 12, "No module named no_such_module")


@pytest.mark.all_layouts
@pytest.mark.parametrize("warm", ["on", "torchrun", "shell"])
def test_other_ways_to_start_it_are_no_other(tmp_path: Path, warm: str) -> None:
    program = tmp_path / "train.py"
    program.write_text("import no_such_module")
    command = [sys.executable, program.name]
    if warm == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run"]
    elif warm == "shell":
        command = ["sh", "-c", f"{sys.executable} train.py"]
    outcome = run(tmp_path, *command, warm="on" if warm == "on" else "off")
    # The end of torchrun's log is a table of its own.
    cause = "exitcode  : 69" if warm == "torchrun" else "No module named 'no_such_module'"
    check_once(*outcome, 12, cause)
