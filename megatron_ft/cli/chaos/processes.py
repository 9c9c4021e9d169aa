"""Finding the processes of a chaos job by what they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

from megatron_ft.cli.chaos.job import ROLE
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.launchers.world import WORLD


def processes(job: str, role: str, node: str = "") -> list[int]:
    """Numbers of the job's running processes in a role, on one node or on all.

    Roles: trainer, smp, drain, encoder; "world" is the encoders with their MPI launcher.
    """
    found = []
    for pid in procfs.own_processes():
        variables = procfs.read_environment(pid)
        if variables.get(JOB) == job and node in ("", variables.get(NODE)):
            if _role(variables) == role or (role == "world" and WORLD in variables):
                found.append(pid)
    return found


def _role(variables: dict[str, str]) -> str:
    if WORLD in variables:
        return "encoder" if NODE in variables else "launcher"
    return variables.get(ROLE, "")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal those that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
