"""Jobs submitted to a real Slurm with the scripts that we ship, followed by what they print."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import ROOT, WarmCluster
from tests.support.printed_jobs import WAIT_SECONDS, PrintedJob
from tests.support.slurm_cluster import SlurmCluster, missing

SCRIPTS = ROOT / "scripts" / "slurm"
ITERATIONS = 40
_MISSING = missing()
NEEDS_SLURM = [
    pytest.mark.slurm,
    pytest.mark.mpi,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING),
]
"""Marks of tests that submit jobs."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")


class SlurmJob(PrintedJob):
    """One submitted job.

    Without a ``site`` of its own its trainers are forked from the tests' host, if there is one.

    ``site`` are the site variables of ``script`` beside those that every test needs, ``flags``
    more of sbatch's, ``run_flags`` those of ``megatron-ft run``.  A ``bare`` job gets no
    environment; the site variables stand in its script.
    """

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        name: str,
        *,
        nodes: int = 2,
        spares: int = 0,
        iterations: int = ITERATIONS,
        iteration_seconds: float = 0.15,
        run_flags: str = "--lease-seconds 4",
        site: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        script: str = "pretrain_gpt_inmem.sbatch",
        bare: bool = False,
    ) -> None:
        super().__init__(folder, name)
        self.cluster = cluster
        example = self.example(iterations, iteration_seconds)
        command: Sequence[str] = [sys.executable, *example]
        if WarmCluster.warm is not None and not site:
            run_flags += " --trainer-per-node"
            command = WarmCluster.stub(*example)
        variables = {
            # Interfaces of other tests come and continue this machine.
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "MEGATRON_FT_HOME": str(ROOT),
            "VENV": str(Path(sys.executable).parent.parent),
            "SPARES": str(spares),
            "RUN_FLAGS": run_flags,
            "RANKS_PER_NODE": "1",
            "PROTECT": "xor:2",
            "STATE_DIR": str(folder / "state"),
            "DRAIN_DIR": str(folder / "drained"),
            "TRAIN": " ".join(command),
            **(site or {}),
        }
        words = [f"--nodes={nodes}", f"--job-name={name}", f"--output={self.output}", *flags]
        path = SCRIPTS / script
        if bare:
            words.append("--export=NONE")
            needed = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "PYTHONPATH": str(ROOT)}
            path = _with_variables(path, {**variables, **needed}, folder / "own.sbatch")
            variables = {}
        words = ["sbatch", "--parsable", *words, str(path)]
        self.id = cluster.run(*words, more=variables).strip()

    def over(self) -> str:
        return state if (state := self.state()) in ENDED else ""

    def until_state(self, *states: str) -> str:
        """Wait until Slurm says one of these; which."""
        self.until(f"state {states}", lambda: self.state() in states)
        return self.state()

    def until_gone(self, name: str) -> None:
        """Wait until no job of this name is in Slurm's queue."""

        def gone() -> bool:
            return not self.cluster.run("squeue", "--noheader", f"--name={name}")

        deadline = time.monotonic() + WAIT_SECONDS
        while not gone():
            assert time.monotonic() < deadline, f"job {name} does not end\n{self.story()}"
            time.sleep(0.3)

    def state(self) -> str:
        return self.cluster.job_state(self.id)

    def start_now(self, *changes: str) -> None:
        """Start a job that was requeued, changed; Slurm would let it wait for two minutes."""
        self.until_state("PENDING")
        self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now", *changes)

    def kill_rank(self, rank: int) -> None:
        os.kill(self.trainer(rank), signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        """Everything on the node dies, its slurmd included, and its memory is gone."""
        self.cluster.kill_node(node)
        shutil.rmtree(default_root() / self.name / node)

    def end_without(self, node: str, state: str = "COMPLETED") -> None:
        """Lose a node and see the job end in this state; then the cluster has the node again."""
        self.lose_node(node)
        try:
            found = self.until_state("COMPLETED", "FAILED", "PENDING")
            assert found == state, f"{found}\n{self.story()}"
        finally:
            self.cluster.start_node(node)

    def tell(self, signal_name: str, task: str = "") -> None:
        """Signal the batch script, as a user or Slurm does; in an array that of ``task``.

        Of a task scancel says that it could not, and signals again until the task has ended.
        """
        job = f"{self.id}_{task}" if task else self.id
        self.cluster.run("scancel", "--batch", f"--signal={signal_name}", job, check=not task)

    def exit_code(self, job: str = "") -> int:
        """What the batch script ended with, or that of another ``job``."""
        fields = self.cluster.run("scontrol", "show", "job", "-o", job or self.id).split()
        return int(next(f for f in fields if f.startswith("ExitCode=")).split("=")[1].split(":")[0])

    def deputies(self) -> set[str]:
        """Nodes of the job on which a deputy runs, as Slurm sees it."""
        query = ("squeue", "--noheader", "--jobs", self.id)
        steps = self.cluster.run(*query, "--steps", "--format=%N %j").splitlines()
        left = self.cluster.run(*query, "--format=%N").strip()
        names = set(self.cluster.run("scontrol", "show", "hostnames", left).split())
        return names & {s.split()[0] for s in steps if s.endswith("megatron-ft-deputy")}


def _with_variables(script: Path, variables: Mapping[str, str], into: Path) -> Path:
    """A copy of a batch script that sets these variables behind its lines for sbatch."""
    lines = script.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    into.write_text("\n".join([*lines[:at], *exports, *lines[at:], ""]))
    return into


Submit = Callable[..., SlurmJob]
"""The fixture ``submit``: SlurmJob with the cluster, the folder and the name of a test."""
