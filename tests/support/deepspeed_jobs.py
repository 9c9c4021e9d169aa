"""Whole jobs of examples/deepspeed_gpt.py: one that is hit, and one that nothing interrupts."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.cli.chaos.trace import read_trace
from megatron_ft.cli.demo.final_state import compare_runs
from megatron_ft.core.startup import before_script
from megatron_ft.supervisor.orders import Timing
from tests.programs.held_in_step import sitecustomize as held
from tests.support import traced_script
from tests.support.jobs import DEEPSPEED_EXAMPLE, ROOT, Job, run_alone

ITERATIONS = 16
SECTION = {
    "enabled": True,
    "follows_engine": True,
    "snapshot_interval": 2,
    "last_iteration": ITERATIONS,
}


@dataclass(frozen=True)
class Program:
    """The example with a DeepSpeed configuration, of the release in the folder ``deepspeed``."""

    config: Mapping[str, Any]
    deepspeed: Path | None = None
    follows: bool = True
    script: tuple[str, ...] = ()
    """More flags of the example."""
    example: Path = DEEPSPEED_EXAMPLE

    def flags(self, folder: Path, *, snapshots: bool) -> list[str]:
        """Its flags; the JSON is written into ``folder``."""
        path = folder / "ds_config.json"
        ours = {**SECTION, "follows_engine": self.follows}
        section = {"inmem_snapshot": ours} if snapshots else {}
        path.write_text(json.dumps({**BASE, **self.config, **section}))
        small = ["--hidden", "64", "--sequence", "16", "--text", str(DEEPSPEED_EXAMPLE)]
        steps = ["--steps", str(ITERATIONS), "--checkpoints", str(folder / "checkpoints")]
        return ["--deepspeed_config", str(path), *small, *steps, *self.script]

    def environment(self, trace: Path) -> dict[str, str]:
        path = [str(ROOT)] if self.deepspeed is None else [str(self.deepspeed), str(ROOT)]
        own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore"}
        return traced_script.environment(trace, own, deepspeed=True)


BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1000,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": ITERATIONS, "warmup_num_steps": 2},
    },
}


def kill_held_rank(job: Job) -> None:
    """Kill the trainer that is held in the middle of a step."""
    os.kill(job.trainers()[int(held.RANK)], signal.SIGKILL)


def lose_node_of_held_rank(job: Job) -> None:
    job.cluster.kill_node(job.supervisor.members.active[int(held.RANK)])


def check_identical(
    program: Program, folder: Path, fault: Callable[[Job], None], **shape: Any
) -> Job:
    """Losses, samples and final states of both runs are equal bit by bit; the job that was hit."""
    job = hit(program, folder / "job", fault, **shape)
    train_alone(program, folder / "alone", job.nodes)
    found = compare_runs(
        folder / "job" / "trace", folder / "alone" / "trace", job.nodes, ITERATIONS
    )
    assert found.identical, found.differences
    return job


def train_alone(program: Program, folder: Path, ranks: int) -> None:
    """Train to the end without snapshots; the trace is in ``folder / "trace"``."""
    folder.mkdir()
    environment = {**os.environ, **program.environment(folder / "trace")}
    command = [str(program.example), *program.flags(folder, snapshots=False)]
    run_alone(command, ranks, folder, environment)


def go_on_alone(program: Program, folder: Path, checkpoints: Path, steps: int) -> list[int]:
    """The steps that two plain ranks make when they start from these checkpoints."""
    folder.mkdir()
    environment = {**os.environ, **program.environment(folder / "trace")}
    flags = program.flags(folder, snapshots=False)
    given = ["--checkpoints", str(checkpoints), "--steps", str(steps)]
    run_alone([str(DEEPSPEED_EXAMPLE), *flags, *given], 2, folder, environment)
    return [line.iteration for line in read_trace(folder / "trace", 0)]


def hit(program: Program, folder: Path, fault: Callable[[Job], None], **shape: Any) -> Job:
    """The job that is hit, after its end; its trace is in ``folder / "trace"``."""
    folder.mkdir()
    holding = before_script(program.environment(folder / "trace"), Path(held.__file__).parent)
    job = made(program, folder, environment=holding, **shape)
    try:
        job.run((held.ITERATION - 1, fault))
    finally:
        job.cluster.destroy()
    return job


def made(program: Program, folder: Path, **shape: Any) -> Job:
    """The job of a program, not started yet."""
    command = (sys.executable, str(program.example), *program.flags(folder, snapshots=True))
    # Imports may keep every core of a small machine from the SMPs for a while.
    timing = Timing(lease=30.0, node_timeout=45.0)
    return Job(folder, command=command, timing=timing, **shape)
