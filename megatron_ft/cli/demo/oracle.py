"""The uninterrupted run: the same ranks with the same command, and none of our processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megatron_ft.cli.demo.inject import POLL_SECONDS
from megatron_ft.cli.demo.trace import TraceLine, TraceTail
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.log_end import last_lines
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.fleet import TrainerFleet
from megatron_ft.supervisor.spec import JobSpec


class OracleError(MegatronFTError):
    """The uninterrupted run failed, so there is nothing to compare with."""


async def run_oracle(spec: JobSpec, trace: Path, on_line: Callable[[TraceLine], None]) -> None:
    """Run the command of ``spec`` on all ranks to its end; OracleError if a rank fails.

    No SMP and no encoder is started.  Whatever happens, no process is left.
    """
    cluster = VirtualCluster(spec.name, [f"node{number}" for number in range(spec.nodes)])
    fleet = TrainerFleet(cluster, spec)
    follower = asyncio.create_task(_follow(TraceTail(trace), on_line))
    try:
        fleet.start(cluster.nodes(), 1, {})
        first = await fleet.ended()
        if not first.finished:
            log = fleet.log_of(first.rank)
            raise OracleError(
                f"the uninterrupted run failed: rank {first.rank} ended with {first.status}; "
                f"end of {log}:\n{last_lines(log)}"
            )
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        cluster.destroy()


async def _follow(tail: TraceTail, on_line: Callable[[TraceLine], None]) -> None:
    def read() -> None:
        for line in tail.read():
            on_line(line)

    try:
        while True:
            read()
            await asyncio.sleep(POLL_SECONDS)
    finally:
        read()
        tail.close()
