"""nvidia-resiliency-ext's restart in process, with its defaults, around the same plain loop.

``python -m benchmarks.restart.nvidia FLAGS`` is one rank.  It starts no process again: the ranks
that are left train on as a smaller world, from the loop's beginning.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.restart.runs import Restart
from benchmarks.restart.torchrun import ENDLESS, LEAST_ITERATIONS, RANKS, environment, trained
from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.process_tools import free_port

NVIDIA = "nvidia-resiliency-ext"
PACKAGE = "nvidia_resiliency_ext"


def installed() -> bool:
    """True if the package is installed."""
    return find_spec(PACKAGE) is not None


def restarts(kills: int, folder: Path) -> list[Restart]:
    """So many jobs that lose a random rank."""
    return [_restart(kill, folder / str(kill)) for kill in range(kills)]


def _restart(kill: int, folder: Path) -> Restart:
    trace, log = folder / "trace", folder / "log"
    folder.mkdir()
    with _job(trace, log):
        begun = trained(trace, 1, LEAST_ITERATIONS, log)
        struck = time.time()
        os.kill(begun[random.Random(f"{NVIDIA} {kill}").randrange(RANKS)].pid, signal.SIGKILL)
        again = trained(trace, 2, 1, log, RANKS - 1)
    seconds = max(line.time for line in again.values()) - struck
    before = {line.pid for line in begun.values()}
    kept = sum(line.pid in before for line in again.values())
    starts = {"in process": RANKS - 1}
    return Restart(NVIDIA, "trainer", seconds, starts=starts, kept=kept, survivors=RANKS - 1)


@contextmanager
def _job(trace: Path, log: Path) -> Iterator[None]:
    """Ranks that run in the block."""
    common = {**environment(trace), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "benchmarks.restart.nvidia", *ENDLESS]
    with log.open("w") as to:
        children = [
            subprocess.Popen(
                command,
                env={
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": f"{RANKS}",
                },
                stdout=to,
                stderr=to,
                start_new_session=True,
            )
            for rank in range(RANKS)
        ]
    try:
        yield
    finally:
        for child in children:
            # Its monitor is a process of the same session.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def main() -> None:
    """One rank."""
    inprocess = import_module(f"{PACKAGE}.inprocess")
    from benchmarks.frameworks import traced_plain

    def train(call_wrapper: Any = None) -> None:
        os.environ[INCARNATION] = str(call_wrapper.iteration + 1)
        traced_plain.main()

    # It finds the parameter by its annotation.
    train.__annotations__["call_wrapper"] = inprocess.CallWrapper
    inprocess.Wrapper()(train)()


if __name__ == "__main__":
    main()
