"""Short-lived processes on nodes: the steps of a drain, of an export, and of a load from disk."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.checkpoint.load import LoadPlan
from megatron_ft.core.background import started_low
from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.errors import DrainError
from megatron_ft.core.process_tools import last_word, log_size
from megatron_ft.launchers.launcher import Launcher, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.supervisor.spec import JobSpec

STEP_TIMEOUT_SECONDS = 3600.0
MODULES = {"load": "megatron_ft.checkpoint.load", "export": "megatron_ft.checkpoint.export_drained"}
"""The module that does a step, where it is not checkpoint/drain.py."""


class StepFailedError(DrainError):
    """A process ended with this status, below zero the number of a signal."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


async def run_step(
    launcher: Launcher,
    spec: JobSpec,
    incarnation: int,
    step: str,
    plans: Mapping[str, DrainPlan | LoadPlan],
) -> None:
    """Run one process of a drain or load on each node; output goes to drain-<node>.log.

    None is left when this returns, raises or is cancelled.  An SMP turns processes of another
    ``incarnation`` away.  DrainError as soon as one fails, NodeUnreachable as the launcher says.
    """
    module = MODULES.get(step, "megatron_ft.checkpoint.drain")
    environment = base_environment() | {INCARNATION: str(incarnation)}
    if step == "export":  # It imports a framework, and must not take memory of GPUs that train.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    handles: list[ProcessHandle] = []
    ends: list[asyncio.Task[None]] = []
    try:
        for node, plan in plans.items():
            argv = [sys.executable, "-m", module, step, plan.to_json()]
            argv = argv if step == "load" else started_low(argv)  # Training awaits a load alone.
            log = spec.log_dir / f"drain-{node}.log"
            before = log_size(log)
            handles.append(launcher.start(node, argv, environment, log))
            ends.append(asyncio.create_task(_step_ended(step, handles[-1], log, before)))
        done, pending = await asyncio.wait(
            ends, timeout=STEP_TIMEOUT_SECONDS, return_when=asyncio.FIRST_EXCEPTION
        )
        for end in done:
            end.result()
        if pending:
            raise DrainError(f"{step} has not ended within {STEP_TIMEOUT_SECONDS:.0f} s")
    finally:
        for handle in handles:
            handle.kill()
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _step_ended(step: str, handle: ProcessHandle, log: Path, before: int) -> None:
    status = await handle.wait()
    if status:
        said = last_word(log, before) if status > 0 else "it was killed"
        raise StepFailedError(f"{step} on {handle.node} ended with {status}: {said}", status)
