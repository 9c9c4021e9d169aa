"""The trainings whose restarts are measured: the demo's job, with commands of other frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.restart import noted_imports
from benchmarks.restart.noted_imports import PACE_SECONDS
from megatron_ft.cli.chaos.trace import VARIABLE
from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings, job_name, job_of
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.launchers.virtual import DEVICES
from tests.support.deepspeed_jobs import Program
from tests.support.jobs import DEEPSPEED_EXAMPLE, ROOT

PLAIN_COMMAND = (sys.executable, "-m", "benchmarks.frameworks.traced_plain")


@dataclass(frozen=True)
class Training:
    """One training: the package it needs, its length, and how the demo's job becomes one of it.

    ``median`` and ``worst`` are limits of the first new iteration by fault, in seconds; for all
    faults under "".
    """

    label: str
    package: str
    iterations: int
    adapt: Callable[[RunCommand, DemoFolders, int, bool], RunCommand]
    median: dict[str, float]
    worst: dict[str, float]

    @property
    def installed(self) -> bool:
        """True if this training can run here."""
        return find_spec(self.package) is not None

    def settings(self, seed: int) -> DemoSettings:
        """The demo's shape, with faults of this seed."""
        return DemoSettings(iterations=self.iterations, seed=seed)

    def job(self, seed: int, folders: DemoFolders, text: Path, *, faults: bool) -> RunCommand:
        """The job that faults hit, or the one that nothing interrupts."""
        made = job_of(self.settings(seed), folders, text, job_name(), snapshots=faults)
        trace = folders.protected if faults else folders.oracle
        made = replace(made, variables={**made.variables, VARIABLE: str(trace)})
        made = self.adapt(made, folders, self.iterations, faults)
        return replace(made, variables=noted_imports.environment(made.variables))


def _megatron(job: RunCommand, folders: DemoFolders, iterations: int, faults: bool) -> RunCommand:
    return replace(job, variables={**job.variables, "PYTHONPATH": str(ROOT)})


def _plain(job: RunCommand, folders: DemoFolders, iterations: int, faults: bool) -> RunCommand:
    flags = ("--iterations", str(iterations), "--losses", "/dev/null", *PACE)
    # The demo hides GPUs from Megatron; this loop trains on one where there is one.
    variables = {k: v for k, v in job.variables.items() if k != DEVICES}
    variables["PYTHONPATH"] = str(ROOT)
    return replace(job, training=(*PLAIN_COMMAND, *flags), variables=variables)


PACE = ("--iteration-seconds", str(PACE_SECONDS), "--backend", "gloo")
"""Of the plain loop.  Where there is a GPU all ranks share it, which NCCL refuses."""


def _zero(stage: int) -> Callable[[RunCommand, DemoFolders, int, bool], RunCommand]:
    program = Program({"zero_optimization": {"stage": stage}})

    def adapt(job: RunCommand, folders: DemoFolders, iterations: int, faults: bool) -> RunCommand:
        (folder := folders.root / ("faults" if faults else "alone")).mkdir(exist_ok=True)
        words = program.flags(folder, snapshots=faults)
        return replace(
            job,
            flags={name: value for name, value in job.flags.items() if name != "--restart"},
            training=(sys.executable, str(DEEPSPEED_EXAMPLE), *words, "--steps", str(iterations)),
            variables=program.environment(Path(job.variables[VARIABLE])),
        )

    return adapt


TRAININGS = {
    "megatron": Training(
        "Megatron's loop",
        "megatron",
        40,
        _megatron,
        {"": 1.5, "node": 2.0},
        {"": 2.5, "node": 3.0},
    ),
    "zero1": Training("DeepSpeed, ZeRO 1", "deepspeed", 200, _zero(1), {"": 2.5}, {}),
    "zero3": Training("DeepSpeed, ZeRO 3", "deepspeed", 200, _zero(3), {"": 2.5}, {}),
    "plain": Training("plain PyTorch", "torch", 200, _plain, {"": 1.0}, {}),
}
"""Trainings by the name that --only takes."""
