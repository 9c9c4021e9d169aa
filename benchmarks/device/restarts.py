"""Restarts on a GPU: each rung timed by its parts, and the memory of a process that restarts often.

    python -m benchmarks.device.restarts --arenas FOLDER [--rehearse] [--only PART]...
                                         [--markdown FILE]

The first table is that of `python -m benchmarks restart`, once with survivors that restart in
their process and once with new processes; four ranks share the GPU over gloo.  The second has the
device memory of one rank that restarts in its process: over gloo after another rank was killed,
over NCCL, whose groups are aborted, after a rewind.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.device.survives import CPU, DETERMINISTIC, GPU, Strikes, place, plain
from benchmarks.jobs import supervised
from benchmarks.restart.runs import Restart, restarts
from benchmarks.restart.table import table
from benchmarks.restart.trainings import TRAININGS, Training
from megatron_ft.cli.chaos.trace import VARIABLE, read_trace
from megatron_ft.cli.demo.settings import DemoFolders
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.events import CommittedEvent

RUNGS = ("in-process", "new-process")
IN_A_ROW = 10
AHEAD = 40
"""Iterations beyond the newest known commit that a rewind names."""

LIMIT_SECONDS = 120.0


def by(rung: str, training: Training) -> Training:
    """The training with ranks that restart by this rung."""

    def adapt(job: RunCommand, folders: DemoFolders, iterations: int, faults: bool) -> RunCommand:
        made = training.adapt(job, folders, iterations, faults)
        flags = {**made.flags, "--restart": rung}
        return dataclasses.replace(made, flags=flags, variables={**made.variables, **DETERMINISTIC})

    return dataclasses.replace(training, adapt=adapt)


def measured(name: str, rung: str, absent: dict[str, str]) -> list[Restart]:
    """The three restarts of one training by one rung; else the reason goes into ``absent``."""
    label = f"{TRAININGS[name].label}, {rung}"
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-ft-restart-") as folder:
            return restarts(name, by(rung, TRAININGS[name]), 1, Path(folder))
    except (RuntimeError, OSError, MegatronFTError) as error:
        print(f"{label}: {error}", file=sys.stderr, flush=True)
        absent[label] = str(error).strip().splitlines()[0]
        return []


class Repeated:
    """Restarts one rank in its process again and again, and notes its device memory after each."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend, self.used, self.pids = backend, list[float](), set[int]()
        self._folder, self._trace = folder, folder / "run"
        self._ranks = 1 if backend == "nccl" else 2

    def measure(self, rehearse: bool) -> None:
        """The whole job; RuntimeError if it does not come to its end."""
        os.environ["MEGATRON_FT_SLOTS"] = "3"
        shape = dataclasses.replace(CPU if rehearse else GPU, iterations=300, pace=0.1)
        supervised(
            plain(self.backend)(shape, self._folder, self._trace),
            self._ranks,
            self._folder,
            LIMIT_SECONDS,
            2,
            more_flags=["--restart", "in-process"],
            variables={**DETERMINISTIC, VARIABLE: str(self._trace)},
            meanwhile=self._restart_often,
        )

    def _restart_often(self, cluster: VirtualCluster) -> None:
        strikes = Strikes(self._ranks, self._folder)
        for _ in range(IN_A_ROW):
            strikes.await_commits("restart")
            self._note()
            strikes.since = time.monotonic()
            if self._ranks > 1:
                os.kill(read_trace(self._trace, 1)[-1].pid, signal.SIGKILL)
            else:
                self._rewind(cluster, strikes)
        strikes.await_commits("restart")
        self._note()

    def _note(self) -> None:
        pid = read_trace(self._trace, 0)[-1].pid
        self.pids.add(pid)
        query = [
            "nvidia-smi",
            "--query-compute-apps=pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
        if torch.cuda.is_available():
            said = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60)
            rows = [line.split(", ") for line in said.stdout.splitlines()]
            self.used += [float(used) for of, used in rows if int(of) == pid]

    def _rewind(self, cluster: VirtualCluster, strikes: Strikes) -> None:
        found = (event.facts for event in strikes.events())
        committed = [one.iteration for one in found if isinstance(one, CommittedEvent)]
        command = [sys.executable, "-m", "megatron_ft", "rewind", "--job", cluster.job]
        command += ["--state-dir", str(self._folder / "state")]
        command += ["--arena-dir", str(self._folder / "arenas")]
        # Training continues while the command starts: memory may hold nothing older than these.
        before = str(committed[-1] + AHEAD)
        subprocess.run([*command, "--before-iteration", before], check=True, timeout=60)


def memory_table(rows: Sequence[Repeated], absent: dict[str, str]) -> str:
    """A line for each backend, in Markdown."""
    lines = ["| restarts in process | number | processes | device memory of rank 0, MiB |"]
    lines += ["| --- | ---: | ---: | --- |"]
    for one in rows:
        used = ", ".join(f"{mib:.0f}" for mib in one.used)
        lines.append(f"| {one.backend} | {IN_A_ROW} | {len(one.pids)} | {used} |")
    lines += [f"| {name} | 0 | | {why} |" for name, why in absent.items()]
    return "\n".join(lines)


def repeated(backend: str, arenas: Path, rehearse: bool, absent: dict[str, str]) -> list[Repeated]:
    """The measured job of one backend; the reason in ``absent`` if it failed."""
    with tempfile.TemporaryDirectory(dir=arenas, prefix="megatron-ft-restarts-") as folder:
        one = Repeated(backend, Path(folder))
        try:
            one.measure(rehearse)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"{backend}: {error}", file=sys.stderr, flush=True)
            absent[backend] = str(error).strip().splitlines()[0]
            return [one] if one.used else []
        return [one]


def main() -> int:
    """Measure and print; 1 if something could not be measured, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arenas", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--only", action="append", choices=["plain", "memory"])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.rehearse):
        print(f"restarts: torch {torch.__version__} sees no GPU here", file=sys.stderr)
        return 2
    chosen = options.only or ["memory", "plain"]
    absent: dict[str, str] = {}
    parts = [partial(_memory, options, absent)] if "memory" in chosen else []
    if "plain" in chosen:
        parts += [partial(_restarts, "plain", rung, absent) for rung in RUNGS]
    text = place()
    for part in parts:
        text += f"\n\n{part()}"
        print(text, flush=True)
        if options.markdown:
            options.markdown.write_text(f"{text}\n")
    print(*(f"not measured: {name}: {why}" for name, why in absent.items()), sep="\n")
    return int(bool(absent))


def _restarts(name: str, rung: str, absent: dict[str, str]) -> str:
    return f"{rung}\n\n{table(measured(name, rung, absent), {})}"


def _memory(options: argparse.Namespace, absent: dict[str, str]) -> str:
    missing: dict[str, str] = {}
    rows = [
        one
        for backend in ("gloo", "nccl")
        for one in repeated(backend, options.arenas, options.rehearse, missing)
    ]
    absent.update(missing)
    return memory_table(rows, missing)


if __name__ == "__main__":
    sys.exit(main())
