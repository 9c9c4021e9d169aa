"""The trainings whose restarts are measured: the demo's job, with commands of other frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from benchmarks.restart import noted_imports
from benchmarks.restart.noted_imports import PACE_SECONDS
from megatron_ft.cli.chaos.job import JobFile
from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings, job_name, job_of
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
    adapt: Callable[[JobFile, int, bool], JobFile]
    median: dict[str, float]
    worst: dict[str, float]

    @property
    def installed(self) -> bool:
        """True if this training can run here."""
        return find_spec(self.package) is not None

    def settings(self, seed: int) -> DemoSettings:
        """The demo's shape, with faults of this seed."""
        return DemoSettings(iterations=self.iterations, seed=seed)

    def job(self, seed: int, folders: DemoFolders, text: Path, *, faults: bool) -> JobFile:
        """The job that faults hit, or the one that nothing interrupts."""
        made = job_of(self.settings(seed), folders, text, job_name(), snapshots=faults)
        made = self.adapt(made, self.iterations, faults)
        environment = noted_imports.environment(made.environment)
        return msgspec.structs.replace(made, environment=environment)


def _megatron(job: JobFile, iterations: int, faults: bool) -> JobFile:
    environment = {**job.environment, "PYTHONPATH": str(ROOT)}
    return msgspec.structs.replace(job, environment=environment)


def _plain(job: JobFile, iterations: int, faults: bool) -> JobFile:
    flags = ("--iterations", str(iterations), "--losses", "/dev/null", *PACE)
    # The demo hides GPUs from Megatron; this loop trains on one where there is one.
    environment = {k: v for k, v in job.environment.items() if k != DEVICES}
    return msgspec.structs.replace(
        job,
        command=(*PLAIN_COMMAND, *flags),
        environment={**environment, "PYTHONPATH": str(ROOT)},
        bare=not faults,
    )


PACE = ("--iteration-seconds", str(PACE_SECONDS), "--backend", "gloo")
"""Of the plain loop.  Where there is a GPU all ranks share it, which NCCL refuses."""


def _zero(stage: int) -> Callable[[JobFile, int, bool], JobFile]:
    program = Program({"zero_optimization": {"stage": stage}})

    def adapt(job: JobFile, iterations: int, faults: bool) -> JobFile:
        (folder := job.place / ("faults" if faults else "alone")).mkdir(exist_ok=True)
        flags = program.flags(folder, snapshots=faults)
        return msgspec.structs.replace(
            job,
            command=(sys.executable, str(DEEPSPEED_EXAMPLE), *flags, "--steps", str(iterations)),
            environment=program.environment(Path(job.trace)),
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
