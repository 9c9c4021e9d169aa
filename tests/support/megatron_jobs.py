"""Whole jobs of Megatron programs: one that loses a trainer, and one that nothing interrupts."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.chaos.trace import final_lines, final_path, read_trace
from megatron_ft.cli.demo import demo_model
from megatron_ft.cli.demo.final_state import compare_runs, differences
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.startup import before_script
from megatron_ft.supervisor.orders import Timing
from tests.programs.held_in_step import sitecustomize as held
from tests.support import traced_script
from tests.support.jobs import ROOT, Fault, Job, WarmCluster, run_alone

RANKS, ITERATIONS = 2, 16
SNAPSHOTS = ("--inmem-snapshot", "--inmem-snapshot-interval", "2")

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron-core with megatron.training",
)
LONG_JOB = [
    pytest.mark.mpi,
    pytest.mark.megatron,
    pytest.mark.all_layouts,
    pytest.mark.timeout(900),
    needs_megatron,
]
"""Marks of tests whose jobs take minutes: only ``--all`` runs them."""


@dataclass(frozen=True)
class Program:
    """A program that trains: what follows ``python``, with which Megatron, and how it is traced.

    ``megatron`` is put first on the search path.  A ``stock`` one is traced from outside and
    takes snapshots without a word of ours in it.
    """

    words: tuple[str, ...]
    megatron: Path
    stock: bool = False
    iterations: int = ITERATIONS

    def flags(self, corpus: Path, trace: Path) -> list[str]:
        flags = demo_model.demo_arguments(
            iterations=self.iterations, data_path=corpus, hidden=64, sequence=32
        )
        return [*self.words, *flags, *(() if self.stock else ("--trace-dir", str(trace)))]

    def environment(self, trace: Path) -> dict[str, str]:
        path = os.pathsep.join([str(self.megatron), str(ROOT)])
        own = {**demo_model.ENVIRONMENT, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        return traced_script.environment(trace, own) if self.stock else own


def installed() -> Path:
    """The folder of the release of megatron-core that is installed."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def packaged(megatron: Path) -> Program:
    """Our own program on a release of megatron-core in the folder ``megatron``."""
    return Program(("-m", "tests.programs.pretrain_gpt"), megatron)


def stock(checkout: Path) -> Program:
    return Program((str(checkout / traced_script.SCRIPT),), checkout, stock=True)


def train_alone(
    program: Program, corpus: Path, trace: Path, *flags: str, ranks: int = RANKS
) -> None:
    """Train to the end with none of our processes and more of Megatron's flags.

    Under torchrun, if there is no host to fork from.
    """
    words, environment = [*program.flags(corpus, trace), *flags], program.environment(trace)
    if WarmCluster.warm is not None:
        trace.mkdir(parents=True, exist_ok=True)
        run_alone(words, ranks, trace, {**os.environ, **environment})
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def kill_held_rank(job: Job) -> None:
    os.kill(job.trainers()[int(held.RANK)], signal.SIGKILL)


def survive_a_kill(
    program: Program,
    corpus: Path,
    folder: Path,
    flags: Sequence[str] = SNAPSHOTS,
    hidden: Sequence[str] = (),
    fault: Fault = kill_held_rank,
    restart: str = SnapshotConfig().restart,
) -> Job:
    """Train under the supervisor and kill a trainer in mid-iteration; the job, destroyed.

    ``hidden`` flags stand in a shell script, where the supervisor does not see them.
    """
    trace = folder / "trace"
    command = (sys.executable, *program.flags(corpus, trace), *flags)
    if hidden:
        script = folder / "train.sh"
        script.write_text(f"exec {shlex.join([*command, *hidden])}\n")
        command = ("sh", str(script))
    holding = before_script(program.environment(trace), Path(held.__file__).parent)
    job = Job(
        folder,
        nodes=RANKS,
        restart=restart,
        command=command,
        environment=holding,
        # Imports of Megatron may keep every core of a small machine from the SMPs for a while.
        timing=Timing(lease=30.0, node_timeout=45.0),
    )
    try:
        job.run((held.ITERATION - 1, fault))
    finally:
        job.cluster.destroy()
    return job


def check_identical(
    program: Program,
    corpus: Path,
    folder: Path,
    *flags: str,
    restart: str = SnapshotConfig().restart,
) -> Job:
    """Losses, samples and final states of both runs are equal bit by bit; the job that was hit.

    Both have more of Megatron's ``flags``.
    """
    (folder / "job").mkdir()
    job = survive_a_kill(program, corpus, folder / "job", (*SNAPSHOTS, *flags), restart=restart)
    assert [source for _, source in job.restores()] == ["own memory"], job.story()
    train_alone(program, corpus, folder / "alone", *flags)
    found = compare_runs(folder / "job" / "trace", folder / "alone", RANKS, ITERATIONS)
    assert found.identical, found.differences
    return job


def check_fewer_ranks(program: Program, corpus: Path, folder: Path, last: int, *flags: str) -> None:
    """A run of 4 ranks that continued with 2 after iteration ``last`` did what Megatron alone does.

    That is: 2 ranks load a checkpoint of this iteration that 4 ranks of Megatron's have saved.
    Losses, samples and final states are equal bit by bit; our trace is in ``folder``/trace.
    """
    own, fewer = folder / "own", folder / "fewer"
    saving = ("--save", str(own), "--save-interval", str(last))
    train_alone(program, corpus, folder / "alone", *flags, *saving, ranks=4)
    loading = ("--load", str(own), "--ckpt-step", str(last))
    train_alone(program, corpus, fewer, *flags, *loading, ranks=2)
    compare_fewer_ranks(program, folder / "trace", fewer, last)


def compare_fewer_ranks(
    program: Program, ours: Path, fewer: Path, last: int, ranks: int = 2
) -> None:
    """The traces of all ranks after iteration ``last``, and their final states, are equal.

    But for random states, and a ``step`` that Megatron's loader leaves in each parameter group and
    torch's optimizers never look at.
    """
    for rank in range(ranks):
        after = steps_after(fewer, rank, last)
        assert list(after) == list(range(last + 1, program.iterations + 1))
        assert after == steps_after(ours, rank, last)
        finals = [_comparable(final_path(folder, rank)) for folder in (ours, fewer)]
        found = differences(*finals)
        assert not found, found[:5]


def _comparable(path: Path) -> Any:
    import torch

    final: Any = torch.load(path, weights_only=True)
    del final["random"]
    for part in final["optimizers"]:
        for group in part["groups"]:
            group.pop("step", None)
    return final


def steps_after(trace: Path, rank: int, last: int) -> dict[int, tuple[str | None, list[int]]]:
    """Loss and samples of each iteration after ``last``."""
    found = final_lines(read_trace(trace, rank))
    return {at: (line.loss, line.samples) for at, line in found.items() if at > last}


def has_reached(trace: Path, iteration: int) -> bool:
    """Whether rank 1 has got so far, by the trace of its training."""
    return any(line.iteration >= iteration for line in read_trace(trace, 1))
