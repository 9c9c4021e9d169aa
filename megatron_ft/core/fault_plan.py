"""Faults planned for the points of a chaos job, and how a process that reaches one suffers them.

The job's folder holds ``plan.json`` (FaultPlan), the runner's socket, and a file that arms the
plan.  fault_points.reach loads this module only in processes of such a job.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from megatron_ft.core.environment import NODE

PLAN_NAME = "plan.json"
SOCKET_NAME = "runner.sock"
ARMED_NAME = "armed"
RUNNER_SECONDS = 120.0


class InjectedError(Exception):
    """The exception that a plan asks for.  No code of ours expects this class."""


class PointFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault at a point.

    It strikes when a process on ``node`` (empty: on any) with this ``rank`` (-1: any) reaches
    ``point`` for the ``nth`` time since the plan was armed, once a job.  ``action`` is what the
    process then does to itself, after the runner has done its part: "kill", "stop",
    "exception", "delay" (for ``seconds``), or nothing.
    """

    name: str
    point: str
    nth: int = 1
    node: str = ""
    rank: int = -1
    action: str = ""
    seconds: float = 0.0


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All faults at points of one job."""

    faults: tuple[PointFault, ...]

    def write(self, folder: Path) -> None:
        """Put the plan into a job's folder; it does nothing before it is armed."""
        (folder / PLAN_NAME).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> FaultPlan:
        return msgspec.json.decode((folder / PLAN_NAME).read_bytes(), type=cls)


class PointReached(msgspec.Struct, frozen=True):
    """Message of a process that found a fault to the runner, whose answer lets it continue."""

    fault: str
    point: str
    node: str
    rank: int
    pid: int


class ArmedPlan:
    """The plan as one process sees it.  Arrivals are counted from when the plan was armed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node = os.environ.get(NODE, "")
        self._rank = int(os.environ.get("RANK", "-1"))
        self._faults = [f for f in FaultPlan.read(folder).faults if self._concerns(f)]
        self._counts = dict.fromkeys((f.name for f in self._faults), 0)

    def _concerns(self, fault: PointFault) -> bool:
        return fault.node in ("", self._node) and fault.rank in (-1, self._rank)

    def __call__(self, point: str) -> None:
        for fault in self._faults:
            if fault.point == point and (self._folder / ARMED_NAME).exists():
                self._counts[fault.name] += 1
                if self._counts[fault.name] == fault.nth and self._claim(fault):
                    self._report(fault)
                    _inflict(fault)

    def _claim(self, fault: PointFault) -> bool:
        """True if this process is the first of the job, in all incarnations, to reach the fault."""
        try:
            os.close(os.open(self._folder / f"fired-{fault.name}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def _report(self, fault: PointFault) -> None:
        """Stand still until the runner has done its part; continue at once without a runner."""
        reached = PointReached(fault.name, fault.point, self._node, self._rank, os.getpid())
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(RUNNER_SECONDS)
            connection.connect(str(self._folder / SOCKET_NAME))
            connection.sendall(msgspec.json.encode(reached) + b"\n")
            connection.recv(16)


def arm(folder: str) -> Callable[[str], None]:
    return ArmedPlan(Path(folder))


def _inflict(fault: PointFault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "exception":
        raise InjectedError(f"injected at {fault.point}")
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action:
        raise ValueError(f"no action {fault.action!r} at {fault.point}")
