"""Start a test's program as a real world, over MPI or TCP, and see how it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_ft.core.environment import NODE
from megatron_ft.erasure.world import MPI, TCP
from megatron_ft.launchers.launcher import Launcher, Placement
from megatron_ft.launchers.mpirun import MpiLauncher, find_mpi
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.world import WorldProcess
from megatron_ft.supervisor.tcp_encoders import TcpEncoders

JOB = "00112233-4455-6677-8899-aabbccddeeff"
ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
BOTH = pytest.mark.parametrize("transport", [pytest.param(MPI, marks=pytest.mark.mpi), TCP])
"""A test for either transport; it asks for ``transport``."""

World = WorldProcess | TcpEncoders


@lru_cache
def launcher() -> MpiLauncher:
    return find_mpi()


class Here:
    """What a world over TCP asks of a launcher, on this machine, with a folder for its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks = folder, list[LocalProcess]()

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def ready_file(self, node: str) -> Path:
        return self.folder / "smp.json"

    def start(
        self, node: str, argv: Sequence[str], env: Mapping[str, str], log_path: Path, stdin: bytes
    ) -> LocalProcess:
        marked = {**env, NODE: node}
        self.ranks.append(LocalProcess.spawn(node, argv, marked, log_path, stdin))
        return self.ranks[-1]


def start_world(
    transport: str, argv: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path
) -> World:
    """Rank i runs the Python arguments ``argv`` with ``environments[i]``; output in folder/log."""
    path = str(ROOT)
    placements = [
        Placement(f"n{i}", [sys.executable, *argv], {**os.environ, "PYTHONPATH": path, **env})
        for i, env in enumerate(environments)
    ]
    if transport == TCP:
        folder.chmod(0o700)
        here = cast(Any, Here(folder))
        return TcpEncoders.start(cast(Launcher, here), placements, folder / "log")
    return WorldProcess.start(launcher(), JOB, placements, folder / "log", folder / "scratch")


def join(world: World, timeout: float) -> int:
    """Exit status, once all ranks have ended."""
    return asyncio.run(asyncio.wait_for(world.wait(), timeout))


def run_world(
    transport: str, argv: Sequence[str], ranks: int, folder: Path, timeout: float
) -> tuple[int, str]:
    world = start_world(transport, argv, [{}] * ranks, folder)
    try:
        status = join(world, timeout)
    finally:
        world.kill()
    return status, (folder / "log").read_text()
