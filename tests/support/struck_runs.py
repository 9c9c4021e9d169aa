"""`megatron-ft run` of a whole job, one process of which is killed at a fault point."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

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

WAIT_SECONDS = 120.0


class StruckRun:
    """The command of one job, which can be run again; ``told`` is its output so far.

    Training ends once the file ``gate`` is in ``folder``.
    """

    def __init__(
        self, folder: Path, nodes: int, settings: Mapping[str, object], training: Sequence[str]
    ) -> None:
        self.name, self.folder, self.told = f"test-{uuid.uuid4().hex[:8]}", folder, ""
        self._chaos = folder / "chaos"
        self._chaos.mkdir()
        self.cluster = VirtualCluster(self.name, [f"node{number}" for number in range(nodes)])
        self._started: list[subprocess.Popen[str]] = []
        ours = {
            "job": self.name,
            "nodes": nodes,
            "lease-seconds": 10,
            "state-dir": folder / "state",
            **settings,
        }
        words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
        run = [sys.executable, "-m", "megatron_ft.cli.main", "run", *words, "--"]
        self._words = [*run, sys.executable, *training]

    def strike(
        self, fault: PointFault, occasion: Callable[[], object], *, supervisor: bool = False
    ) -> None:
        """Run it, and kill the process that arrives at the point after the first protected commit.

        ``occasion`` is called at that commit.  With ``supervisor`` the command is killed instead.
        """
        FaultPlan((fault,)).write(self._chaos)
        with closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(str(self._chaos / SOCKET_NAME))
            listener.listen()
            listener.settimeout(WAIT_SECONDS)
            self.start()
            assert self.read_until("(protected)"), f"no snapshot was protected:\n{self.told}"
            (self._chaos / ARMED_NAME).touch()
            occasion()
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as file:
                reached = msgspec.json.decode(file.readline(), type=PointReached)
                os.kill(self._process.pid if supervisor else reached.pid, signal.SIGKILL)
        if supervisor:
            self._communicate()
            assert self._process.returncode == -signal.SIGKILL, self.told

    def start(self) -> None:
        process = subprocess.Popen(
            self._words,
            cwd=ROOT,
            env={**os.environ, fault_points.VARIABLE: str(self._chaos)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)

    def read_until(self, *words: str) -> bool:
        """Read lines until one has the first of the words, then the next; False at the end."""
        left = list(words)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.told += line
            left = left[1:] if left and left[0] in line else left
            if not left:
                return True
        return False

    def end(self) -> None:
        (self.folder / "gate").touch()
        self._communicate()
        assert self._process.returncode == 0 and "training finished" in self.told, self.told

    @property
    def _process(self) -> subprocess.Popen[str]:
        return self._started[-1]

    def _communicate(self) -> None:
        self.told += self._process.communicate(timeout=WAIT_SECONDS)[0]

    @contextmanager
    def open(self, made: list[Any]) -> Iterator[None]:
        """Leave no process of it; ``made`` are the jobs whose clusters are destroyed."""
        made.append(SimpleNamespace(cluster=self.cluster))
        try:
            yield
        finally:
            # Before its nodes are: a supervisor that a failed test leaves would start them again.
            for process in self._started:
                process.kill()
                process.wait()
