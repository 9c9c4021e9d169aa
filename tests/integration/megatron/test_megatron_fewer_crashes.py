"""The supervisor, or a process of a drain, is killed while a Megatron job changes to fewer nodes.

The same command is run again.  The oracle is Megatron alone, as in test_megatron_fewer.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
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
from tests.support.jobs import ROOT
from tests.support.megatron_fewer import program
from tests.support.megatron_jobs import LONG_JOB, SNAPSHOTS, compare_fewer_ranks, train_alone

pytestmark = LONG_JOB

NODES = [f"node{number}" for number in range(4)]
LOST = NODES[3]
WAIT_SECONDS = 300.0
Oracle = Callable[[int], Path]


@pytest.fixture(scope="module")
def fewer(tmp_path_factory: pytest.TempPathFactory, megatron_corpus: Path) -> Oracle:
    """Traces of 2 ranks that load what 4 ranks of Megatron alone saved, by its iteration."""
    folder = tmp_path_factory.mktemp("oracle")
    own = folder / "own"

    @cache
    def saved() -> None:
        saving = ("--save", str(own), "--save-interval", "2")
        train_alone(program(), megatron_corpus, folder / "alone", *saving, ranks=4)

    @cache
    def trace(last: int) -> Path:
        saved()
        loading = ("--load", str(own), "--ckpt-step", str(last))
        train_alone(program(), megatron_corpus, folder / str(last), *loading, ranks=2)
        return folder / str(last)

    return trace


class Command:
    """`megatron-ft run` of a job that can shrink, in a process that can be killed."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.name, self.trace = f"test-{uuid.uuid4().hex[:8]}", folder / "trace"
        self.exports, self.chaos = folder / "exports", folder / "chaos"
        self.exports.mkdir()
        self.chaos.mkdir()
        self.cluster = VirtualCluster(self.name, NODES)
        self.started: list[subprocess.Popen[str]] = []
        ours = {
            "job": self.name,
            "nodes": len(NODES),
            "protect": "xor:2",
            "lease-seconds": 30,
            "state-dir": folder / "state",
            "on-no-spare": "shrink",
            "drain-dir": folder / "drains",
            "drain-interval": 10_000,
            "drain-export-dir": self.exports,
        }
        words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
        training = [*program().flags(corpus, self.trace), "--load", str(self.exports)]
        command = [sys.executable, *training, *SNAPSHOTS]
        self.words = [sys.executable, "-m", "megatron_ft.cli.main", "run", *words, "--", *command]

    def start(self) -> subprocess.Popen[str]:
        """Run it, or run it again."""
        process = subprocess.Popen(
            self.words,
            cwd=ROOT,
            env={
                **os.environ,
                **program().environment(self.trace),
                fault_points.VARIABLE: str(self.chaos),
            },
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
def command(made: list[Any], tmp_path: Path, megatron_corpus: Path) -> Iterator[Command]:
    command = Command(tmp_path, megatron_corpus)
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


def check(command: Command, told: str, fewer: Oracle) -> None:
    """Two nodes resumed from what was committed, as Megatron alone would."""
    kept = re.findall(r"draining before anything else; .*?iteration (\d+)", told)
    starts = re.findall(r"starting from .*iter_(\d+)", told)
    assert kept and starts, told
    assert {int(start) for start in starts} == {int(kept[0])}, told
    assert told.count("continuing with 2 nodes instead of 4, 2 ranks") <= 1, told
    assert "training finished" in told, told
    last = int(starts[0])
    compare_fewer_ranks(program(), command.trace, fewer(last), last)


# Arrivals count from the loss of the node: incarnation one drains, the next has fewer nodes.
@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("shrink.chosen", 1),
        ("shrink.exported", 1),
        ("shrink.noted", 1),
        ("recovery.admitting", 2),
        ("recovery.ready", 1),
        ("recovery.trainer_started", 1),
        ("drain.manifest", 1),
        ("export.written", 1),
        ("export.renamed", 1),
    ],
)
def test_a_supervisor_killed_while_the_job_shrinks_is_followed_by_one_that_goes_on(
    command: Command, fewer: Oracle, point: str, nth: int
) -> None:
    listener = command.arm(PointFault("s", point, nth=nth))
    first = command.start()
    told = lose_a_node_once_protected(command, first)
    struck(listener, lambda arrival: first.kill())
    told += first.communicate(timeout=WAIT_SECONDS)[0]
    assert first.returncode == -signal.SIGKILL, told
    second = command.start()
    told += second.communicate(timeout=WAIT_SECONDS)[0]
    assert second.returncode == 0, told
    check(command, told, fewer)


@pytest.mark.parametrize("point", ["drain.manifest", "export.renamed"])
def test_a_drain_killed_while_the_job_shrinks_is_repeated(
    command: Command, fewer: Oracle, point: str
) -> None:
    listener = command.arm(PointFault("s", point))
    first = command.start()
    told = lose_a_node_once_protected(command, first)
    struck(listener, lambda arrival: os.kill(arrival.pid, signal.SIGKILL))
    told += first.communicate(timeout=WAIT_SECONDS)[0]
    assert first.returncode == 0, told
    check(command, told, fewer)
