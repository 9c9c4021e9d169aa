"""torchrun's own restart around the same plain loop: all ranks are started again, from nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.restart.runs import Restart
from benchmarks.restart.trainings import PACE, PLAIN_COMMAND
from megatron_ft.cli.chaos.trace import VARIABLE, TraceLine, read_trace
from tests.support.jobs import ROOT

TORCHRUN = "torchrun"
RANKS = 4
LEAST_ITERATIONS = 5
"""Trained before the next kill."""

WAIT_SECONDS = 120.0
ENDLESS = ("--iterations", "1000000", "--losses", os.devnull, *PACE)


def restarts(kills: int, folder: Path) -> list[Restart]:
    """So many kills of a random rank in one job."""
    trace, log = folder / "trace", folder / "torchrun.log"
    flags = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={kills}"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *PLAIN_COMMAND[1:], *ENDLESS]
    with log.open("w") as to:
        job = subprocess.Popen(command, env=environment(trace), stdout=to, stderr=to)
    try:
        return [_restart(kill, trace, log) for kill in range(kills)]
    finally:
        job.terminate()
        job.wait(WAIT_SECONDS)


def environment(trace: Path) -> Mapping[str, str]:
    """Variables for the plain loop."""
    ours = {VARIABLE: str(trace), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Else ranks that torchrun starts again look for gloo's peers at the addresses of the dead.
    return {**os.environ, **ours, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _restart(kill: int, trace: Path, log: Path) -> Restart:
    """Kill one rank, and wait for the first iteration that all have ended again."""
    begun = trained(trace, kill + 1, LEAST_ITERATIONS, log)
    victim = random.Random(f"torchrun {kill}").randrange(RANKS)
    struck = time.time()
    os.kill(begun[victim].pid, signal.SIGKILL)
    again = trained(trace, kill + 2, 1, log)
    seconds = max(line.time for line in again.values()) - struck
    return Restart(
        TORCHRUN,
        "trainer",
        seconds,
        starts={"cold": RANKS},
        survivors=RANKS - 1,
        imports=RANKS,
    )


def trained(
    trace: Path, incarnation: int, iterations: int, log: Path, ranks: int = RANKS
) -> dict[int, TraceLine]:
    """Each rank's line of this iteration, once all have ended it; TimeoutError with the log."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = {
            rank: line
            for rank in range(ranks)
            for line in read_trace(trace, rank)
            if (line.incarnation, line.iteration) == (incarnation, iterations)
        }
        if len(found) == ranks:
            return found
        if time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-2000:]
            raise TimeoutError(f"no iteration {iterations} after restart {incarnation - 1}: {said}")
        time.sleep(0.02)
