"""Draining committed snapshots to disk while the job runs: when, and by which processes.

At most one drain runs.  It takes the newest committed snapshot, and what is committed
meanwhile supersedes what was before it; nothing is queued.  A drain that fails is emitted as an
event and counted; training does not notice.  Each step of a drain is a short-lived process on
some nodes, all or nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_ft.checkpoint.disk_format import mount_point
from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.checkpoint.load import LoadPlan
from megatron_ft.core.background import started_low
from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.errors import DrainError, MegatronFTError
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId
from megatron_ft.core.process_tools import last_word, log_size
from megatron_ft.launchers.launcher import Launcher, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.smp.processes import STALL_SECONDS
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import DiskPlaces
from megatron_ft.supervisor.processes import unless
from megatron_ft.supervisor.spec import JobSpec

SAFETY_FACTOR = 1.5
"""The last drain before the time limit may take so many times as long as the slowest so far."""


@dataclass
class Urgency:
    """Reasons to drain at once, each given once, again only after it was gone.

    Times are in seconds of one clock.  ``ends_at`` is when the job will be killed, None if
    nobody knows; ``margin`` is what must be left then.
    """

    ends_at: float | None = None
    margin: float = 0.0
    _given: set[str] = field(default_factory=set)

    def poll(self, now: float, *, spares_gone: bool, slowest: float) -> str:
        """A new reason, or empty.

        ``spares_gone`` is whether a node was lost and nobody is left to replace another one;
        ``slowest`` how long drains took, 0 if none has ended yet.
        """
        present = set()
        if spares_gone:
            present.add("a node is lost and no spare is left: the next loss stops the job")
        late = self.margin + SAFETY_FACTOR * slowest
        if self.ends_at is not None and not slowest:
            present.add("the job's time is limited, and the first drain shows how long one takes")
        if self.ends_at is not None and now >= self.ends_at - late:
            present.add("the job's time ends")
        fresh, self._given = present - self._given, present
        return "; ".join(sorted(fresh))


def is_due(last: int, committed: int, interval: int, urgent: bool = False) -> bool:
    """True if ``committed`` is to be drained when ``last`` was the iteration before.  Pure.

    What is ``urgent`` waits for no interval, but the same iteration is not drained again.  A lower
    one is of training that has gone back, and what is on disk of what was given up.  An interval
    of 0 stands for none.
    """
    step = 1 if urgent else interval
    return step > 0 and (committed < last or committed >= last + step)


def noted_places(before: DiskPlaces, spec: JobSpec) -> DiskPlaces:
    """The places on disk for the job's notes from now on.

    The mount point of a drain folder is looked up once, when the job first names the folder.
    At a restart its file system may be unmounted, and the folder would then seem to belong on
    the disk below; it may also hang, so nothing of it is touched.
    """
    drain_dir = "" if spec.settings.drain_dir is None else str(spec.settings.drain_dir.absolute())
    mount = before.drain_mount if drain_dir == before.drain_dir else ""
    if drain_dir and not mount:
        mount = str(mount_point(Path(drain_dir)))
    checkpoints = "" if spec.checkpoint_dir is None else str(spec.checkpoint_dir.absolute())
    return DiskPlaces(drain_dir, mount, checkpoints)


class Drains:
    """The drains of one job over all its incarnations, and the exports of what was drained.

    ``failures`` counts those that came to nothing.  Nothing is written unless a file system is
    mounted at ``mount`` ("": not looked at).
    """

    def __init__(
        self,
        spec: JobSpec,
        launcher: Launcher,
        job: uuid.UUID,
        coordinator: Coordinator,
        spares_gone: Callable[[], bool],
        mount: str = "",
    ) -> None:
        self.failures = 0
        self._spec, self._launcher, self._job = spec, launcher, job
        self._coordinator = coordinator
        self._task: asyncio.Task[None] | None = None
        self._places: dict[str, str] = {}
        self._seats: dict[str, ShardPlacement] = {}
        self._lineage: tuple[Ancestor, ...] = ()
        self._last, self._taken_at = 0, time.monotonic()
        self._news, self._stalled = asyncio.Event(), asyncio.Event()
        self._ending = self._urgent = self._busy = False
        self._cap = spec.settings.drain_bandwidth_mib
        self._slowest = 0.0
        self._mount = Path(mount) if mount else None
        limit = spec.time_limit_seconds
        self._urgency = Urgency(
            ends_at=time.monotonic() + limit if limit else None,
            margin=spec.settings.drain_stop_seconds,
        )
        self._spares_gone = spares_gone
        coordinator.observers.add(self._on_event)

    def begin(
        self,
        places: Mapping[str, str],
        seats: Mapping[str, ShardPlacement],
        lineage: tuple[Ancestor, ...],
        first: int,
    ) -> None:
        """An incarnation takes snapshots from iteration ``first`` on; ``places`` maps shards to
        nodes."""
        self._places, self._seats, self._lineage = dict(places), dict(seats), lineage
        self._last = min(self._last, first)
        if self._spec.settings.drain_interval or self._spec.settings.drain_minutes:
            self._ending, self._task = False, asyncio.create_task(self._keep())

    async def settle(self) -> None:
        """Training has finished: let the drain end that runs, and the one that is due."""
        if self._task is not None:
            self._ending = True
            self._news.set()
            await self._end(self._task)

    async def last(self, seconds: float) -> bool:
        """This incarnation takes no more snapshots: drain the newest committed one without a cap.

        Whether it, or a newer one, is on disk after at most ``seconds``.  A drain that runs
        under a cap is given up for it.
        """
        committed = self._coordinator.committed
        if self._task is None or committed is None:
            return False
        text = f"a last drain, for at most {seconds:g} s"
        self._coordinator.observers.emit("stopping", text)
        if self._cap:
            await self.abandon()
            self._cap, self._last = 0.0, -1
            self._task = asyncio.create_task(self._keep())
        if not self._busy and not self._is_durable(committed[0]):
            self._last = -1
        self._ending = self._urgent = True
        self._news.set()
        await asyncio.wait({self._task}, timeout=seconds)
        return self._is_durable(committed[0])

    def _is_durable(self, snapshot: SnapshotId) -> bool:
        durable = self._coordinator.durable
        return durable is not None and durable[0] >= snapshot

    async def abandon(self) -> None:
        """This incarnation has ended: end the drain that runs.  Nothing waits for nodes or
        disks."""
        if self._task is not None:
            self._task.cancel()
            await self._end(self._task)

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Wait for the task; a mistake of ours in it ends drains, visibly, and nothing else."""
        await asyncio.wait({task})
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(f"drains had stopped: {error!r}")

    async def _stall(self) -> DrainError:
        """Wait until an SMP gives up a process of the drain that does not get on."""
        self._stalled.clear()
        await self._stalled.wait()
        return DrainError(f"a process of it has not run for {STALL_SECONDS:.0f} s")

    def _on_event(self, event: JobEvent) -> None:
        if event.kind == "reader_stalled":
            self._stalled.set()
        if event.kind == "committed":
            self._news.set()

    async def _keep(self) -> None:
        while True:
            while (plan := self._next()) is not None:
                self._busy = True
                try:
                    await self._drain(plan)
                except asyncio.CancelledError:
                    # Its incarnation ended: due again, also if the next one has nothing newer.
                    self._last = -1
                    raise
                finally:
                    self._busy = False
            if self._ending:
                return
            self._news.clear()
            # Not wait_for: before Python 3.12 it loses a cancel that comes with the news.
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait({news}, timeout=self._coordinator.timing.heartbeat)
            finally:
                news.cancel()
            self._look_for_urgency()

    def _look_for_urgency(self) -> None:
        """Have what is committed drained at once for a new reason."""
        now, gone = time.monotonic(), self._spares_gone()
        if reason := self._urgency.poll(now, spares_gone=gone, slowest=self._slowest):
            self._urgent = True
            self._coordinator.observers.emit("drain_urged", f"draining at once: {reason}")

    def _next(self) -> DrainPlan | None:
        """The newest committed snapshot, if it is due and not what was restored from disk."""
        committed, settings, now = (
            self._coordinator.committed,
            self._spec.settings,
            time.monotonic(),
        )
        old = 0 < 60 * settings.drain_minutes <= now - self._taken_at
        urgent = self._urgent or old
        if committed is None or self._is_durable(committed[0]):
            return None
        if not is_due(self._last, committed[1], settings.drain_interval, urgent):
            return None
        self._urgent, self._taken_at = False, now
        snapshot, self._last, level = committed
        return self._plan(snapshot, self._last, level, settings.drain_export_dir)

    def _plan(
        self, snapshot: SnapshotId, iteration: int, level: str, export_dir: Path | None
    ) -> DrainPlan:
        directory = self._spec.settings.drain_dir
        assert directory is not None
        return DrainPlan(
            job=self._job,
            snapshot=snapshot,
            iteration=iteration,
            level=level,
            lineage=self._lineage,
            directory=directory.absolute(),
            shard_count=len(self._places),
            keep=self._spec.settings.drain_keep,
            bandwidth_mib=self._cap,
            mount=self._mount,
            export_dir=export_dir,
        )

    async def _drain(self, plan: DrainPlan) -> None:
        started, nodes, reason = time.monotonic(), sorted(set(self._places.values())), ""
        try:
            await self._coordinator.hold(plan.snapshot, nodes)
            await unless(self._write(plan, nodes), self._stall())
            self._coordinator.durable = (plan.snapshot, plan.iteration)
            await self._try("tidy", plan, nodes[0], "retention_failed")
        except (MegatronFTError, OSError) as error:
            reason = str(error)
        # Not when cancelled: the next incarnation voids it, and must not wait for us.
        await self._coordinator.release(nodes)
        if reason:
            then = "the job ends" if self._ending else "training continues"
            text = f"iteration {plan.iteration} could not be written to disk; {then}, and what was "
            self._failed(f"{text}there stays: {reason}")
            with suppress(MegatronFTError, OSError):
                await self._run("clear", {nodes[0]: plan})
            return
        seconds = time.monotonic() - started
        self._slowest = max(self._slowest, seconds)
        text = f"iteration {plan.iteration} is on disk after {seconds:.1f} s: {plan.folder}"
        self._emit("drained", text, plan)
        if plan.export_dir is not None:
            await self._export(plan, nodes[0])

    async def _run(self, step: str, plans: Mapping[str, DrainPlan]) -> None:
        await run_step(self._launcher, self._spec, self._coordinator.incarnation, step, plans)

    async def _write(self, plan: DrainPlan, nodes: list[str]) -> None:
        """Write a checkpoint, all of it or nothing that anybody would take for one.

        Older ones are not removed by the process that publishes: the supervisor may die before it
        knows, and the next incarnation may descend from what that would remove.
        """
        await self._run("clear", {nodes[0]: plan})
        seats: dict[str, dict[str, ShardPlacement]] = {node: {} for node in nodes}
        for shard, node in self._places.items():
            seats[node][shard] = self._seats[shard]
        parts = {n: msgspec.structs.replace(plan, shards=shards) for n, shards in seats.items()}
        await self._run("write", parts)
        await self._run("publish", {nodes[0]: plan})

    async def _try(self, step: str, plan: DrainPlan, node: str, kind: str) -> bool:
        """Run a step behind a drain; its failure stops nothing and is an event of this kind."""
        try:
            await self._run(step, {node: plan})
        except (MegatronFTError, OSError) as error:
            self._emit(kind, f"iteration {plan.iteration} is on disk; {step}: {error}", plan)
            return False
        return True

    async def _export(self, plan: DrainPlan, node: str) -> None:
        started = time.monotonic()
        if await self._try("export", plan, node, "export_failed"):
            text = f"iteration {plan.iteration} is exported to {plan.export_dir} after"
            self._emit("exported", f"{text} {time.monotonic() - started:.1f} s", plan)

    def _failed(self, text: str) -> None:
        """Emit and count a failed drain; ``megatron-ft status`` shows the number and the text."""
        self.failures += 1
        self._coordinator.drain_failures = (self.failures, text)
        self._coordinator.observers.emit("drain_failed", text)

    def _emit(self, kind: str, text: str, plan: DrainPlan) -> None:
        fields = {"iteration": plan.iteration, "folder": str(plan.folder)}
        self._coordinator.observers.emit(kind, text, **fields)


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
