"""The short-lived processes of a drain: the same step on some nodes, all or nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.errors import DrainError
from megatron_ft.core.log_end import last_word, size
from megatron_ft.core.priority import started_low
from megatron_ft.launchers.launcher import Launcher, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.supervisor.spec import JobSpec

STEP_TIMEOUT_SECONDS = 3600.0
MODULES = {"load": "megatron_ft.checkpoint.load", "export": "megatron_ft.checkpoint.export_drained"}
"""Which module does a step, where it is not checkpoint/drain.py."""

AWAITED = {"load"}
"""Steps that training waits for; all others are background work."""

ENVIRONMENTS = {"export": {"CUDA_VISIBLE_DEVICES": ""}}
"""A step that imports a framework must not take memory of the GPUs that train."""


class Plan(Protocol):
    """The argument of a step's process."""

    def to_json(self) -> str:
        """As text."""


class StepFailedError(DrainError):
    """A process ended with this status, below zero the number of a signal."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class DrainProcesses:
    """Runs steps of drains and loads through a Launcher; output goes to drain-<node>.log.

    ``incarnation`` is the incarnation that they are of: an SMP turns others away.
    """

    def __init__(self, launcher: Launcher, spec: JobSpec, incarnation: Callable[[], int]) -> None:
        self._launcher, self._spec, self._incarnation = launcher, spec, incarnation

    async def run(self, step: str, plans: Mapping[str, Plan]) -> None:
        """One process on each node; DrainError as soon as one of them fails.

        None is left when this returns, raises or is cancelled.  NodeUnreachable as the
        launcher says.
        """
        handles: list[ProcessHandle] = []
        ends: list[asyncio.Task[None]] = []
        try:
            for node, plan in plans.items():
                module = MODULES.get(step, "megatron_ft.checkpoint.drain")
                argv = [sys.executable, "-m", module, step, plan.to_json()]
                argv = argv if step in AWAITED else started_low(argv)
                log = self._log_of(node)
                environment = {**base_environment(), **ENVIRONMENTS.get(step, {})}
                environment |= self._spec.background_variables
                environment[INCARNATION] = str(self._incarnation())
                before = size(log)
                handles.append(self._launcher.start(node, argv, environment, log))
                ends.append(asyncio.create_task(self._end(step, handles[-1], before)))
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

    async def _end(self, step: str, handle: ProcessHandle, before: int) -> None:
        status = await handle.wait()
        if status:
            said = last_word(self._log_of(handle.node), before) if status > 0 else "it was killed"
            reason = f"{step} on {handle.node} ended with {status}: {said}"
            raise StepFailedError(reason, status)

    def _log_of(self, node: str) -> Path:
        return self._spec.log_dir / f"drain-{node}.log"
