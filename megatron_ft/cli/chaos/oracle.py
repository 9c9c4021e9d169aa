"""The oracle: the same training with no fault, whose every bit a faulted run is compared with."""

from __future__ import annotations

import asyncio
import shutil
import time

import msgspec

from megatron_ft.cli.chaos.job import ChaosSettings, JobFile
from megatron_ft.cli.chaos.trace import Lines, read_traces
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.process_tools import last_lines
from megatron_ft.supervisor.processes import TrainerFleet


class OracleError(MegatronFTError):
    """The uninterrupted run failed, so there is nothing to compare with."""


def oracle_traces(settings: ChaosSettings) -> dict[int, Lines]:
    """The traces of an uninterrupted run; {} if the command writes none.  See run_oracle."""
    folder = settings.folder / "oracle"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    # Not beside the arenas of jobs: nothing that lives would tell whose the folder is.
    (root := folder / "memory").mkdir(mode=0o700)
    job = settings.job(f"oracle-{time.monotonic_ns()}", folder)
    command = settings.command or settings.training(None)
    run_oracle(msgspec.structs.replace(job, command=command, root=str(root), bare=True))
    return read_traces(folder / "trace", settings.ranks)


def run_oracle(job: JobFile) -> None:
    """Run the job's command on all ranks to its end; OracleError if a rank fails.

    No SMP and no encoder is started.  No process is left, however it ends.
    """
    asyncio.run(_run(job))


async def _run(job: JobFile) -> None:
    cluster = job.cluster()
    fleet = TrainerFleet(cluster, job.spec())
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
        await fleet.kill_all()
        cluster.destroy()
