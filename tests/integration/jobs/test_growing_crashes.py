"""A process is killed while larger arenas are made; the result is what it must be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.core.fault_plan import ARMED_NAME, PointFault
from megatron_ft.launchers.virtual import VirtualCluster
from tests.integration.jobs.test_reshape_crashes import WAIT_SECONDS, Command, struck
from tests.programs import changing_training as program

pytestmark = [
    pytest.mark.usefixtures("warm_trainers"),
    pytest.mark.mpi,
    pytest.mark.all_layouts,
]

ITERATIONS, CHANGE = 400, 60
NODES = ["node0", "node1"]


class Growing(Command):
    """A job of two nodes; rank 0 unfreezes a layer that has no room in its arena."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cluster = VirtualCluster(self.name, NODES)
        ours = {
            "job": self.name,
            "nodes": len(NODES),
            "protect": "xor:2",
            "lease-seconds": 10,
            "state-dir": folder / "state",
        }
        words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
        training = [program.__file__, "--folder", str(folder), "--iterations", str(ITERATIONS)]
        training += ["--change", str(CHANGE), "--width", "4096"]
        command = [sys.executable, *training]
        self.words = [sys.executable, "-m", "megatron_ft.cli.main", "run", *words, "--", *command]


@pytest.fixture
def command(made: list[Any], tmp_path: Path) -> Iterator[Growing]:
    command = Growing(tmp_path)
    made.append(SimpleNamespace(cluster=command.cluster))
    yield command
    for process in command.started:
        process.kill()
        process.wait()


def arm_once_protected(command: Growing, process: subprocess.Popen[str]) -> str:
    """Arm the plan after the first protected commit; the output so far."""
    assert process.stdout is not None
    told = ""
    for line in process.stdout:
        told += line
        if "(protected)" in line:
            (command.chaos / ARMED_NAME).touch()
            return told
    raise AssertionError(f"no snapshot was protected:\n{told}")


def end(command: Growing, process: subprocess.Popen[str]) -> str:
    """Let training end once larger arenas hold a snapshot; the state must be the expected one."""
    assert process.stdout is not None
    told, renewed = "", False
    for line in process.stdout:
        told += line
        renewed |= "had outgrown" in line
        if renewed and "(protected)" in line:
            break
    (command.folder / "gate").touch()
    told += process.communicate(timeout=WAIT_SECONDS)[0]
    assert process.returncode == 0 and "training finished" in told, told
    for rank in range(len(NODES)):
        found = json.loads((command.folder / f"result-{rank}.json").read_text())
        expected = program.expected(rank, CHANGE, 0, ITERATIONS, 4096)
        assert found["digest"] == expected, told
    return told


@pytest.mark.parametrize(
    "point", ["renewal.noted", "renewal.aside", "renewal.made", "renewal.told"]
)
def test_a_supervisor_that_is_killed_is_followed_by_one_that_takes_the_older_arenas(
    command: Growing, point: str
) -> None:
    listener = command.arm(PointFault("s", point))
    first = command.start()
    told = arm_once_protected(command, first)
    struck(listener, lambda arrival: first.kill())
    told += first.communicate(timeout=WAIT_SECONDS)[0]
    assert first.returncode == -signal.SIGKILL, told
    again = end(command, command.start())
    assert "restoring iteration" in again and "from own memory" in again, again


def test_an_smp_that_is_killed_costs_another_attempt(command: Growing) -> None:
    """It dies when one arena of its node is a source."""
    listener = command.arm(PointFault("s", "reshape.source"))
    first = command.start()
    told = arm_once_protected(command, first)
    struck(listener, lambda arrival: os.kill(arrival.pid, signal.SIGKILL))
    told += end(command, first)
    assert told.count("had outgrown") == 1, told
