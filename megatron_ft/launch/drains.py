"""Draining committed snapshots to disk while the job runs: when, and by which processes.

At most one drain runs.  It takes the newest committed snapshot, and what is committed
meanwhile supersedes what was before it; nothing is queued.  A drain that fails is told
and counted; training does not notice.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from megatron_ft.coordinator.coordinator import Coordinator
from megatron_ft.coordinator.events import JobEvent
from megatron_ft.disk.drain import DrainPlan
from megatron_ft.errors import MegatronFTError
from megatron_ft.identity import Ancestor
from megatron_ft.launch.drain_processes import DrainProcesses
from megatron_ft.launch.launcher import Launcher
from megatron_ft.launch.spec import JobSpec


def is_due(last: int, committed: int, interval: int) -> bool:
    """Whether ``committed`` is to be drained when ``last`` was the iteration before.  Pure."""
    return interval > 0 and committed >= last + interval


class Drains:
    """The drains of one job over all its lives, and the exports of what was drained.

    ``failures`` and ``export_failures`` count those that came to nothing.
    """

    def __init__(
        self, spec: JobSpec, launcher: Launcher, job: uuid.UUID, coordinator: Coordinator
    ) -> None:
        self.failures = 0
        self.export_failures = 0
        self._spec, self._job = spec, job
        self._coordinator = coordinator
        self._processes = DrainProcesses(launcher, spec.log_dir)
        self._task: asyncio.Task[None] | None = None
        self._places: dict[str, str] = {}
        self._lineage: tuple[Ancestor, ...] = ()
        self._last = 0
        self._news = asyncio.Event()
        self._ending = False
        coordinator.observers.add(self._note)

    def begin(self, places: Mapping[str, str], lineage: tuple[Ancestor, ...], first: int) -> None:
        """A life takes snapshots from iteration ``first`` on; ``places`` maps shards to nodes."""
        self._places, self._lineage = dict(places), lineage
        self._last = min(self._last, first)
        if self._spec.drain_interval and self._spec.drain_dir is not None:
            self._ending = False
            self._task = asyncio.create_task(self._keep())

    async def settle(self) -> None:
        """Training has finished: let the drain end that runs, and the one that is due."""
        if self._task is not None:
            self._ending = True
            self._news.set()
            await self._end(self._task)

    async def abandon(self) -> None:
        """This life has ended: end the drain that runs.  Nothing waits for nodes or disks."""
        if self._task is not None:
            self._task.cancel()
            await self._end(self._task)

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Wait for the task; a mistake of ours in it ends drains, visibly, and nothing else."""
        await asyncio.wait({task})
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            self._coordinator.observers.tell("drain_failed", f"drains had stopped: {error!r}")

    def _note(self, event: JobEvent) -> None:
        if event.kind == "committed":
            self._news.set()

    async def _keep(self) -> None:
        while True:
            while (plan := self._next()) is not None:
                await self._drain(plan)
            if self._ending:
                return
            self._news.clear()
            await self._news.wait()

    def _next(self) -> DrainPlan | None:
        """The newest committed snapshot, if it is due."""
        committed, directory = self._coordinator.committed, self._spec.drain_dir
        if committed is None or not is_due(self._last, committed[1], self._spec.drain_interval):
            return None
        assert directory is not None
        snapshot, self._last, level = committed
        return DrainPlan(
            job=self._job,
            snapshot=snapshot,
            iteration=self._last,
            level=level,
            lineage=self._lineage,
            directory=directory.absolute(),
            shard_count=len(self._places),
            keep=self._spec.drain_keep,
            bandwidth_mib=self._spec.drain_bandwidth_mib,
            export_dir=self._spec.drain_export_dir,
        )

    async def _drain(self, plan: DrainPlan) -> None:
        started = time.monotonic()
        nodes = sorted(set(self._places.values()))
        try:
            await self._coordinator.hold(plan.snapshot, nodes)
            await self._write(plan, nodes)
            reason = ""
        except (MegatronFTError, OSError) as error:
            reason = str(error)
        # Not when cancelled: the next incarnation voids it, and must not wait for us.
        await self._coordinator.release(nodes)
        if reason:
            await self._failed(plan, nodes[0], reason)
        else:
            seconds = time.monotonic() - started
            self._coordinator.durable = (plan.snapshot, plan.iteration)
            text = f"iteration {plan.iteration} is on disk after {seconds:.1f} s: {plan.folder}"
            self._tell("drained", text, plan)
            if plan.export_dir is not None:
                await self._export(plan, nodes[0])

    async def _write(self, plan: DrainPlan, nodes: list[str]) -> None:
        await self._processes.run("clear", {nodes[0]: plan})
        shards = {n: tuple(s for s, place in self._places.items() if place == n) for n in nodes}
        await self._processes.run(
            "write", {n: msgspec.structs.replace(plan, shards=shards[n]) for n in nodes}
        )
        await self._processes.run("publish", {nodes[0]: plan})

    async def _export(self, plan: DrainPlan, node: str) -> None:
        started = time.monotonic()
        try:
            await self._processes.run("export", {node: plan})
        except (MegatronFTError, OSError) as error:
            self.export_failures += 1
            text = f"iteration {plan.iteration} is on disk but could not be exported, training "
            self._tell("export_failed", f"{text}goes on: {error}", plan)
        else:
            seconds = time.monotonic() - started
            text = f"iteration {plan.iteration} is exported to {plan.export_dir} after"
            self._tell("exported", f"{text} {seconds:.1f} s", plan)

    async def _failed(self, plan: DrainPlan, node: str, reason: str) -> None:
        self.failures += 1
        self._tell(
            "drain_failed",
            f"iteration {plan.iteration} could not be written to disk, training goes on and what "
            f"was there stays: {reason}",
            plan,
        )
        # What it wrote would keep the space that the next one needs.
        with suppress(MegatronFTError, OSError):
            await self._processes.run("clear", {node: plan})

    def _tell(self, kind: str, text: str, plan: DrainPlan) -> None:
        fields = {"iteration": plan.iteration, "folder": str(plan.folder)}
        self._coordinator.observers.tell(kind, text, **fields)
