"""Background work keeps away from training by its priority."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_ft.core.background import started_low
from megatron_ft.core.errors import DrainError
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.steps import run_step

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")


THREADS = """
import os, sys, threading
from megatron_ft.core.background import lower_priority
lower_priority()
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
print(len(os.listdir("/proc/self/task")), flush=True)
sys.stdin.read()
"""


@X86
def test_every_thread_has_the_low_priority() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert int(child.stdout.readline()) >= 2
        tasks = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
        nice = max(os.getpriority(os.PRIO_PROCESS, 0), 10)
        assert len(tasks) >= 2
        assert {nice_of(child.pid, task) for task in tasks} == {nice}
        assert {io_class(task) for task in tasks} == {3}
    finally:
        child.communicate(timeout=30)


def test_background_work_has_its_priority_from_its_start() -> None:
    """And calling it low once more does not lower it further."""
    shows = "from os import nice; print(nice(0)); "
    shows += "from megatron_ft.core.background import lower_priority; "
    command = [sys.executable, "-c", shows + "lower_priority(); print(nice(0))"]
    said = subprocess.run(started_low(command), capture_output=True, check=True, timeout=30)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert said.stdout.split() == [str(min(own + 10, 19)).encode()] * 2


@pytest.mark.parametrize("step", ["write", "export", "load"])
def test_only_the_step_that_training_waits_for_has_trainings_priority(
    step: str, tmp_path: Path
) -> None:
    started: list[Sequence[str]] = []

    class Refusing:
        """A launcher, and a plan, that get no further than the command."""

        def start(self, node: str, argv: Sequence[str], *_: object) -> None:
            started.append(argv)
            raise DrainError("enough")

        def to_json(self) -> str:
            return "{}"

    spec = JobSpec(name="low", command=("true",), nodes=4, log_dir=tmp_path)
    with pytest.raises(DrainError, match="enough"):
        plans: Any = {"node0": Refusing()}
        asyncio.run(run_step(cast(Launcher, Refusing()), spec, 1, step, plans))
    assert (started[0][0] == "nice") == (step != "load")


def nice_of(pid: int, task: int) -> int:
    """Field 19 of a thread's stat (proc(5))."""
    text = Path(f"/proc/{pid}/task/{task}/stat").read_text()
    return int(text.rsplit(")", 1)[1].split()[16])


def io_class(task: int) -> int:
    """ioprio_get(2); 252 is its number."""
    return int(ctypes.CDLL(None).syscall(252, 1, task)) >> 13
