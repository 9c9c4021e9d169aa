"""Draining committed snapshots to disk while the job runs: when, and by which processes.

At most one drain runs.  It takes the newest committed snapshot, and what is committed
meanwhile supersedes what was before it; nothing is queued.  A drain that fails is emitted as an
event and counted; training does not notice.  Each step of a drain is a short-lived process on
some nodes, all or nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from megatron_ft.checkpoint.disk_format import mount_point
from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.core.errors import DrainError, MegatronFTError
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId
from megatron_ft.smp.processes import STALL_SECONDS
from megatron_ft.supervisor.drain_times import Urgency, gives_way, is_due
from megatron_ft.supervisor.ends import first_end
from megatron_ft.supervisor.events import (
    CommittedEvent,
    DrainedEvent,
    JobEvent,
    ReaderStalledEvent,
)
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.job_state import DiskPlaces
from megatron_ft.supervisor.slot_choice import BESIDE_DRAINS, SlotChoice
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.steps import run_step

RETRY_SECONDS = 2.0
"""Pause before an urgent drain that has failed is tried again; each failure doubles it."""
LONGEST_RETRY_SECONDS = 60.0
MOST_LAST_TRIES = 3
"""Most tries of a last drain, behind which something waits for its end."""


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
    mounted where the job's notes say.
    """

    def __init__(self, job: JobContext) -> None:
        self.failures, self._last_failure = 0, ""
        self._spec, self._launcher, self._job = job.spec, job.launcher, job.state.record.job
        self._fleet, self._standing, self._pump = job.fleet, job.standing, job.pump
        self._spares_gone = job.members.spares_gone
        self._task: asyncio.Task[None] | None = None
        self._places: dict[str, str] = {}
        self._seats: dict[str, ShardPlacement] = {}
        self._lineage: tuple[Ancestor, ...] = ()
        self._last, self._taken_at = 0, time.monotonic()
        self._news, self._stalled = asyncio.Event(), asyncio.Event()
        self._ending = False
        # What runs and since when; since when one is urgent; failures since the last success.
        self._plan_begun: tuple[DrainPlan, float] | None = None
        self._urgent_since: float | None = None
        self._failures_in_row = self._last_tries = 0
        self._not_before = 0.0
        self._step = ""
        self._warned = self._cost_said = False
        self._cap = job.spec.settings.drain_bandwidth_mib
        self._slowest = 0.0
        state, places = job.state, noted_places(job.state.record.disk, job.spec)
        if places != state.record.disk:
            state.update(disk=places)
        self._mount = Path(places.drain_mount) if places.drain_mount else None
        limit = job.spec.time_limit_seconds
        self._urgency = Urgency(
            ends_at=time.monotonic() + limit if limit else None,
            margin=job.spec.settings.drain_stop_seconds,
        )
        job.observers.subscribe(self._on_event)

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

    def warn_of_slots(self, slots: SlotChoice) -> None:
        """Report once, before the first drain, that a failure during one costs more."""
        if self._warned or self._task is None or slots.count >= BESIDE_DRAINS:
            return
        self._warned = True
        text = (
            "with two slots no snapshot is taken while a drain runs, so a failure then loses the "
            f"iterations since it began; {slots.reason}"
        )
        self._fleet.observers.emit("drain_cost", text)

    def report(self) -> dict[str, object]:
        return {"drain_failures": self.failures, "drain_failure": self._last_failure}

    def reseat(self, seats: Mapping[str, ShardPlacement]) -> None:
        """The arenas of the shards are of other lengths from now on."""
        self._seats = dict(seats)

    async def settle(self) -> None:
        """Training has finished: let the drain end that runs, and the one that is due."""
        if self._task is None:
            return
        committed, hanging = self._standing.committed, self._fleet.hanging
        self._ending, self._last_tries, self._not_before = True, 0, 0.0
        if self._plan_begun is not None:
            due = f"iteration {self._plan_begun[0].iteration} is on disk"
            stalled = f"its drain has made no progress for {STALL_SECONDS:.0f} s"
            text = f"training has finished; the job ends once {due}, or {stalled}"
            self._fleet.observers.emit("drain_awaited", text)
        elif hanging and committed is not None and not self._is_durable(committed.snapshot):
            self._failed(f"nothing more is drained, as the disk hangs: {', '.join(hanging)}")
        self._news.set()
        await self._end(self._task)

    async def last(self, seconds: float) -> bool:
        """This incarnation takes no more snapshots: drain the newest committed one without a cap.

        Whether it, or a newer one, is on disk after at most ``seconds``.  A drain that runs is
        given up for it if it runs under a cap, or only one of the two can still be written.
        """
        committed = self._standing.committed
        if self._task is None or committed is None:
            return False
        text = f"a last drain, for at most {seconds:g} s"
        self._fleet.observers.emit("stopping", text)
        if self._cap or self._gives_way(committed.snapshot, seconds):
            await self.abandon()
            self._cap = 0.0
            self._task = asyncio.create_task(self._keep())
        self._ending, self._urgent_since = True, time.monotonic()
        self._last_tries, self._not_before = MOST_LAST_TRIES, 0.0
        self._last = -1
        self._news.set()
        await asyncio.wait({self._task}, timeout=seconds)
        return self._is_durable(committed.snapshot)

    def _gives_way(self, newest: SnapshotId, seconds: float) -> bool:
        """True if the drain that runs is of an older snapshot, and in the way of the newest."""
        if self._plan_begun is None:
            return False
        plan, begun = self._plan_begun
        older = plan.snapshot < newest
        return older and gives_way(time.monotonic() - begun, self._slowest, seconds)

    def _is_durable(self, snapshot: SnapshotId) -> bool:
        durable = self._standing.durable
        return durable is not None and durable.snapshot >= snapshot

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

    async def _stall(self) -> NoReturn:
        """Wait until an SMP gives up a process of the drain that does not get on."""
        self._stalled.clear()
        await self._stalled.wait()
        raise DrainError(
            f"{self._step} has not run for {STALL_SECONDS:.0f} s: does the disk of "
            f"{self._spec.settings.drain_dir} answer?"
        )

    def _on_event(self, event: JobEvent) -> None:
        if isinstance(event.facts, ReaderStalledEvent):
            # A reader that is not the drain's, such as a verification, may stall as well.
            if event.facts.reader.rpartition("-")[0] == self._step:
                self._stalled.set()
        if isinstance(event.facts, CommittedEvent):
            self._news.set()

    async def _keep(self) -> None:
        while True:
            while (plan := self._next()) is not None:
                self._plan_begun = plan, time.monotonic()
                try:
                    await self._drain(plan)
                except asyncio.CancelledError:
                    # Its incarnation ended: due again, also if the next one has nothing newer.
                    self._last = -1
                    raise
                finally:
                    self._plan_begun = None
            if self._ending and not self._urgent_left():
                return
            self._news.clear()
            # Not wait_for: before Python 3.12 it loses a cancel that comes with the news.
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait({news}, timeout=self._fleet.timing.heartbeat)
            finally:
                news.cancel()
            self._look_for_urgency()

    def _urgent_left(self) -> bool:
        """True while a last drain is to be tried again: it has failed, or the disk hangs."""
        committed, since = self._standing.committed, self._urgent_since
        if since is None or committed is None or self._is_durable(committed.snapshot):
            return False
        if self._fleet.hanging and time.monotonic() - since > STALL_SECONDS:
            return False
        return self._last_tries > 0

    def _look_for_urgency(self) -> None:
        """Have what is committed drained at once for a new reason."""
        now, gone = time.monotonic(), self._spares_gone()
        if reason := self._urgency.poll(now, spares_gone=gone, slowest=self._slowest):
            self._urgent_since = now
            self._fleet.observers.emit("drain_urged", f"draining at once: {reason}")

    def _next(self) -> DrainPlan | None:
        """The newest committed snapshot, if it is due and not what was restored from disk.

        None is due while an older drain hangs: the disk does not answer.
        """
        committed, settings, now = (
            self._standing.committed,
            self._spec.settings,
            time.monotonic(),
        )
        old = 0 < 60 * settings.drain_minutes <= now - self._taken_at
        urgent = self._urgent_since is not None or old
        if committed is None or self._is_durable(committed.snapshot) or self._fleet.hanging:
            return None
        if now < self._not_before or not is_due(
            self._last, committed.iteration, settings.drain_interval, urgent
        ):
            return None
        self._taken_at = now
        snapshot, self._last, level = committed
        return self._plan(snapshot, self._last, level, settings.drain_export_dir)

    def _note_end(self, begun: float, reason: str) -> None:
        """Note how a drain has ended.  What is urgent stays due until one is complete."""
        since = self._urgent_since
        if not reason:
            self._failures_in_row, self._not_before = 0, 0.0
            self._urgent_since = None if since is not None and since <= begun else since
            return
        self._failures_in_row += 1
        self._last_tries = 0 if self._launcher.is_over(reason) else self._last_tries - 1
        if since is not None:
            pause = RETRY_SECONDS * 2 ** min(self._failures_in_row - 1, 10)
            self._last, self._not_before = -1, time.monotonic() + min(pause, LONGEST_RETRY_SECONDS)

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
            await self._fleet.hold(plan.snapshot, nodes)
            await self._write(plan, nodes)
            self._standing.drains(plan.snapshot, plan.iteration)
            await self._try("tidy", plan, nodes[0], "retention_failed")
        except (MegatronFTError, OSError) as error:
            reason = str(error)
        cost = self._cost()
        # Not when cancelled: the next incarnation voids it, and must not wait for us.
        await self._fleet.release(nodes)
        self._note_end(started, reason)
        if reason:
            await self._after_failure(plan, nodes[0], reason)
            return
        seconds = time.monotonic() - started
        self._slowest = max(self._slowest, seconds)
        text = f"iteration {plan.iteration} is on disk after {seconds:.1f} s: {plan.folder}"
        event = DrainedEvent(iteration=plan.iteration, folder=str(plan.folder))
        self._fleet.observers.emit(event, text)
        if cost and not self._cost_said:
            self._cost_said = True
            self._fleet.observers.emit("drain_cost", cost)
        if plan.export_dir is not None:
            await self._export(plan, nodes[0])

    async def _after_failure(self, plan: DrainPlan, node: str, reason: str) -> None:
        """Report a failed drain and tidy up, unless its processes hang on the disk."""
        await self._fleet.refresh()  # SMPs know of those
        hanging = self._fleet.hanging
        if self._urgent_left() or (self._urgent_since is not None and not self._ending):
            then = "it is tried again " + (
                "once the disk answers" if hanging else "soon, as it is urgent"
            )
        else:
            then = "the job ends" if self._ending else "training continues"
        text = f"iteration {plan.iteration} could not be written to disk; {then}, and what was "
        self._failed(f"{text}there stays: {reason}")
        if not hanging:
            with suppress(MegatronFTError, OSError):
                await self._run("clear", {node: plan})

    async def _run(self, step: str, plans: Mapping[str, DrainPlan]) -> None:
        """Run a step; DrainError also if one of its processes makes no progress."""
        self._step = step
        incarnation = self._fleet.incarnation
        work = run_step(self._launcher, self._spec, incarnation, step, plans)
        await first_end(work, self._stall())

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

    def _cost(self) -> str:
        """The cost of a failure just before the end of the drain, if snapshots were
        skipped for it."""
        committed, progress = self._standing.committed, self._fleet.progress
        if committed is None or not self._pump.skips.now:
            return ""
        lost = max(progress.values(), default=committed.iteration) - committed.iteration
        return (
            f"no snapshot was taken while it was written: a failure would have lost {lost} "
            "iterations; with --slots 3 snapshots continue, for one more copy of each shard in "
            "memory"
        )

    def _failed(self, text: str) -> None:
        """Emit and count a failed drain; ``megatron-ft status`` shows the number and the text."""
        self.failures, self._last_failure = self.failures + 1, text
        self._fleet.observers.emit("drain_failed", text)

    def _emit(self, kind: str, text: str, plan: DrainPlan) -> None:
        fields = {"iteration": plan.iteration, "folder": str(plan.folder)}
        self._fleet.observers.emit(kind, text, **fields)
