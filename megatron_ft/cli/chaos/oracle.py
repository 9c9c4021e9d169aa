"""The same training with nothing of ours and no fault: what every bit is compared with."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos import trace
from megatron_ft.cli.chaos.cases import Case
from megatron_ft.cli.chaos.job import TRAINING_MODULE, ChaosCluster, JobFile
from megatron_ft.cli.chaos.settings import Settings
from megatron_ft.cli.chaos.trace import Lines, read_traces
from megatron_ft.cli.chaos.warm_python import WarmPython, start_at
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.process_tools import last_lines
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.supervisor.processes import TrainerFleet

PRELOADED = (
    "torch",
    "torch.distributed",
    "megatron_ft.trainer.manager",
    "megatron_ft.trainer.cpu",
    "megatron_ft.trainer.state",
    "megatron_ft.supervisor.supervisor",
    "megatron_ft.checkpoint.drain",
    "megatron_ft.checkpoint.load",
    "megatron_ft.checkpoint.export_drained",
    "megatron_ft.cli.chaos.trace",
)


class OracleError(MegatronFTError):
    """The uninterrupted run failed, so there is nothing to compare with."""


def run_oracle(settings: Settings) -> dict[int, Lines]:
    """The traces of an uninterrupted run; {} if the command writes none."""
    folder = settings.folder / "oracle"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    job = settings.job(Case("commit.last", "node", "kill"), f"oracle-{time.monotonic_ns()}", folder)
    # Not beside the arenas of jobs: nothing that lives would tell whose the folder is.
    (root := folder / "memory").mkdir(mode=0o700)
    command = settings.command or settings.training(None)
    job = msgspec.structs.replace(job, command=command, root=str(root))
    asyncio.run(_run(job))
    return read_traces(folder / "trace", settings.ranks)


class _Bare(ChaosCluster):
    """Starts processes that know nothing of a job."""

    def __init__(self, job: JobFile) -> None:
        super().__init__(job)
        self._job_file = job
        self.started: list[LocalProcess] = []

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start or fork a process with nothing of ours in its environment but the trace."""
        kept = (trace.VARIABLE,)
        bare = {k: v for k, v in env.items() if k in kept or not k.startswith("MEGATRON_FT_")}
        if self._job_file.warm and tuple(argv[1:3]) == ("-m", TRAINING_MODULE):
            child = start_at(self._job_file.warm, argv[1:], bare, log_path)
            process = LocalProcess(node, child.pid, child)  # type: ignore[arg-type]
            child.go()
        else:
            process = LocalProcess.spawn(node, argv, bare, log_path)
        self.started.append(process)
        return process


async def _run(job: JobFile) -> None:
    launcher = _Bare(job)
    fleet = TrainerFleet(launcher, job.spec())
    try:
        fleet.start(job.node_names[: job.nodes], 1, {})
        first = await fleet.ended()
        if not first.finished:
            log = fleet.log_of(first.rank)
            raise OracleError(
                f"the uninterrupted run failed: rank {first.rank} ended with {first.status}; "
                f"end of {log}:\n{last_lines(log)}"
            )
    finally:
        for process in launcher.started:
            process.kill()
            process.join(10)
        launcher.destroy()


def warm_python() -> WarmPython:
    """A server that has imported what every process of a case needs."""
    return WarmPython(PRELOADED)
