"""A job of 7 nodes whose relays are killed in the middle of each round of a snapshot."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.coordinator.events import JobEvent
from megatron_ft.coordinator.link import SmpLink
from megatron_ft.launch.job_state import JobState
from megatron_ft.launch.supervisor import Supervisor
from megatron_ft.smp import messages as m
from megatron_ft.testing.chaos.job import TRAINING_MODULE, JobFile
from megatron_ft.testing.chaos.plan import ARMED_NAME, Strike

NODES, FAN_OUT = 7, 2
STRIKES = (
    Strike("permit", "smp.granted", node="n3", action="kill"),
    Strike("encode", "smp.encoding.stored", nth=3, node="n0", action="kill"),
    Strike("commit", "smp.committed", nth=6, node="n3", action="kill"),
)
"""n0 passes on to n1 and n2, n3 to n4 and n5, which passes on to n6."""


class Passing(SmpLink):
    """A link that notes which relays have answered, and which have brought reports."""

    relays: set[str] = set()  # noqa: RUF012
    brought: set[str] = set()  # noqa: RUF012

    async def ask(self, request: m.Message, timeout: float) -> Any:
        answer = await super().ask(request, timeout)
        if isinstance(answer, m.Passed):
            self.relays.add(self.node)
        return answer

    def _hear(self, report: m.Event | m.Gathered) -> None:
        if isinstance(report, m.Gathered):
            self.brought.add(self.node)
        super()._hear(report)


async def wait_for(condition: Callable[[], bool], run: asyncio.Task[Any], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + 150.0
    while not condition():
        if run.done():
            run.result()
        assert not run.done() and asyncio.get_running_loop().time() < deadline, f"no {what}"
        await asyncio.sleep(0.02)


async def run_with_strikes(folder: Path, warm: str, events: list[JobEvent]) -> None:
    name = f"relays-{uuid.uuid4().hex[:8]}"
    flags = ("--iterations", "1000000", "--seconds", "0.05")
    command = (sys.executable, "-m", TRAINING_MODULE, *flags)
    job = JobFile(name, str(folder), command, NODES, 0, "xor:7", lease=20.0, warm=warm)
    cluster = job.cluster()
    try:
        with JobState(folder / "state", name) as state:
            spec = dataclasses.replace(job.spec(), transport="tcp")
            supervisor = Supervisor(spec, cluster, state)
            supervisor.observers.add(events.append)
            coordinator = supervisor.coordinator
            coordinator.link_type, coordinator.relays.fan_out = Passing, FAN_OUT
            run = asyncio.create_task(supervisor.run())
            try:
                await story(supervisor, run, folder, events)
            finally:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
    finally:
        cluster.destroy()


async def story(
    supervisor: Supervisor, run: asyncio.Task[Any], folder: Path, events: list[JobEvent]
) -> None:
    def protected() -> int:
        return sum(e.fields.get("level") == "protected" for e in events)

    await wait_for(lambda: protected() >= 1, run, "snapshot before the faults")
    assert Passing.relays == Passing.brought == {"n0", "n3"}
    (folder / ARMED_NAME).touch()
    for strike in STRIKES:
        fired = folder / f"fired-{strike.name}"
        await wait_for(fired.exists, run, f"fault {strike.name}")
        before = protected()
        await wait_for(lambda least=before + 2: protected() >= least, run, "snapshot after it")  # type: ignore[misc]
    Passing.relays.clear()
    Passing.brought.clear()
    for seen, what in ((Passing.relays, "answers"), (Passing.brought, "reports")):
        await wait_for(lambda seen=seen: seen == {"n0", "n3"}, run, f"{what} of relays after all")  # type: ignore[misc]
