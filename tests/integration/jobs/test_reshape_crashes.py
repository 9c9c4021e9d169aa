"""A process is killed while a job is reshaped to fewer nodes; the result is what it must be.

After the death of a supervisor the same command is run again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_ft.core import fault_points
from megatron_ft.core.fault_plan import (
    ARMED_NAME,
    SOCKET_NAME,
    FaultPlan,
    PointFault,
    PointReached,
)
from megatron_ft.launchers.virtual import VirtualCluster
from tests.integration.jobs.test_reshape_jobs import check
from tests.programs import elastic_training as program
from tests.support.jobs import ROOT

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

NODES = [f"node{number}" for number in range(4)]
LOST = NODES[3]
WAIT_SECONDS = 120.0
ITERATIONS = 400


class Command:
    """`megatron-ft run` of a job that can shrink, in a process that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = f"test-{uuid.uuid4().hex[:8]}", folder
        self.chaos = folder / "chaos"
        self.chaos.mkdir()
        self.cluster = VirtualCluster(self.name, NODES)
        self.started: list[subprocess.Popen[str]] = []
        ours = {
            "job": self.name,
            "nodes": len(NODES),
            "protect": "rs:3+1",
            "lease-seconds": 10,
            "state-dir": folder / "state",
            "on-no-spare": "shrink",
            "grow": "off",
        }
        words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
        training = [program.__file__, "--folder", str(folder), "--iterations", str(ITERATIONS)]
        command = [sys.executable, *training]
        self.words = [sys.executable, "-m", "megatron_ft.cli.main", "run", *words, "--", *command]

    def start(self) -> subprocess.Popen[str]:
        """Run it, or run it again."""
        process = subprocess.Popen(
            self.words,
            cwd=ROOT,
            env={**os.environ, fault_points.VARIABLE: str(self.chaos)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def arm(self, strike: PointFault) -> socket.socket:
        """The socket at which the process at the point reports, and waits for an answer."""
        FaultPlan((strike,)).write(self.chaos)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.chaos / SOCKET_NAME))
        listener.listen()
        listener.settimeout(WAIT_SECONDS)
        return listener


@pytest.fixture
def command(made: list[Any], tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    made.append(SimpleNamespace(cluster=command.cluster))
    yield command
    # Before its nodes are: a supervisor that a failed test leaves would start them again.
    for process in command.started:
        process.kill()
        process.wait()


def lose_a_node_once_protected(command: Command, process: subprocess.Popen[str]) -> str:
    """Arm the plan and lose a node after the first protected commit; the output so far."""
    assert process.stdout is not None
    told = ""
    for line in process.stdout:
        told += line
        if "(protected)" in line:
            (command.chaos / ARMED_NAME).touch()
            command.cluster.kill_node(LOST)
            return told
    raise AssertionError(f"no snapshot was protected:\n{told}")


def struck(listener: socket.socket, strike: Callable[[PointReached], None]) -> None:
    """Wait for the process at the point, strike it, and release it if it still lives."""
    with closing(listener):
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as file:
            strike(msgspec.json.decode(file.readline(), type=PointReached))


def end(command: Command, process: subprocess.Popen[str]) -> str:
    """Let training end, and check that all elements are as they must be."""
    (command.folder / "gate").touch()
    told = process.communicate(timeout=WAIT_SECONDS)[0]
    assert process.returncode == 0, told
    assert "training finished" in told, told
    check(command.folder, 3, ITERATIONS)
    return told


MORE = pytest.mark.all_layouts


# Arrivals count from the loss of the node.
@pytest.mark.parametrize(
    ("point", "nth"),
    [
        pytest.param("shrink.chosen", 1, marks=MORE),
        pytest.param("shrink.noted", 1, marks=MORE),
        pytest.param("recovery.admitting", 2, marks=MORE),
        pytest.param("recovery.adopted", 1, marks=MORE),
        pytest.param("recovery.ready", 1, marks=MORE),
        pytest.param("reshape.sources", 1, marks=MORE),
        pytest.param("reshape.filled", 1, marks=MORE),
    ],
)
def test_a_supervisor_that_is_killed_is_followed_by_one_that_continues(
    command: Command, point: str, nth: int
) -> None:
    listener = command.arm(PointFault("s", point, nth=nth))
    first = command.start()
    told = lose_a_node_once_protected(command, first)
    struck(listener, lambda arrival: first.kill())
    told += first.communicate(timeout=WAIT_SECONDS)[0]
    assert first.returncode == -signal.SIGKILL, told
    again = end(command, command.start())
    assert (told + again).count("continuing with 3 nodes instead of 4, 3 ranks") <= 2, told
    assert "4 shards reshaped to 3" in again or "reshaped" in told


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("reshape.ordered", marks=MORE),
        pytest.param("reshape.half", marks=MORE),
        pytest.param("reshape.source", marks=MORE),
    ],
)
def test_an_encoder_or_an_smp_that_is_killed_costs_another_attempt(
    command: Command, point: str
) -> None:
    listener = command.arm(PointFault("s", point))
    first = command.start()
    told = lose_a_node_once_protected(command, first)
    struck(listener, lambda arrival: os.kill(arrival.pid, signal.SIGKILL))
    told += end(command, first)
    assert told.count("4 shards reshaped to 3") == 1, told
