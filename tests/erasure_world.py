"""Start a test's program as a real MPI world and see how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from megatron_ft.launch.launcher import Placement
from megatron_ft.launch.mpirun import MpiLauncher, find_mpi
from megatron_ft.launch.world import WorldProcess

JOB = "00112233-4455-6677-8899-aabbccddeeff"
TESTS = Path(__file__).parent


@lru_cache
def launcher() -> MpiLauncher:
    return find_mpi()


def start_world(
    argv: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path
) -> WorldProcess:
    """Rank i runs the Python arguments ``argv`` with ``environments[i]``; output in folder/log."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    placements = [
        Placement(f"n{i}", [sys.executable, *argv], {**os.environ, "PYTHONPATH": path, **env})
        for i, env in enumerate(environments)
    ]
    return WorldProcess.start(launcher(), JOB, placements, folder / "log", folder / "scratch")


def run_world(argv: Sequence[str], ranks: int, folder: Path, timeout: float) -> tuple[int, str]:
    """Exit status and output."""
    world = start_world(argv, [{}] * ranks, folder)
    try:
        status = world.join(timeout)
    finally:
        world.kill()
    return status, (folder / "log").read_text()
