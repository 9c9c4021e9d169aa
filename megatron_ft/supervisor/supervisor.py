"""Supervisor of one job, from its first start to its end: incarnations, and failures between.

It starts processes and decides who replaces whom; its Fleet talks to the SMPs.
When it is killed, SMPs and arenas stay, and the same command run again takes them over.

When nodes are lost and no spare is left, it drains memory at once.  Then the job continues with
fewer nodes, waits for replacement hosts, or stops, as its settings say.  On SIGTERM the newest
committed snapshot goes to disk before all ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_ft.core.errors import (
    ConfigError,
    ControlPlaneError,
    MegatronFTError,
    MissingEnvironmentError,
    NoRoomError,
    RegistrationError,
    RestartBudgetError,
    SchedulerAwayError,
    StaleIncarnationError,
    UntrustedFileError,
)
from megatron_ft.core.identity import HOLD, SHRINK
from megatron_ft.core.private_files import replace_file
from megatron_ft.core.process_tools import in_thread
from megatron_ft.launchers.launcher import Launcher, ReturningHosts
from megatron_ft.launchers.slurm.allocation import ReplacementHosts
from megatron_ft.supervisor.disk_restore import DiskRestores, LoadError
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.elastic import shrink
from megatron_ft.supervisor.emergency_drain import EmergencyDrain
from megatron_ft.supervisor.ends import (
    Asked,
    End,
    Failure,
    Finished,
    Interrupted,
    LoadFailed,
    NodeLost,
    NoRoom,
    NotRegistered,
    RebuildFailed,
)
from megatron_ft.supervisor.evacuation import Evacuations
from megatron_ft.supervisor.events import BackoffEvent, CommittedEvent, EndedEvent, JobEvent
from megatron_ft.supervisor.evidence import EvidenceKeeper
from megatron_ft.supervisor.exposure_alarm import ExposureAlarm
from megatron_ft.supervisor.health import Health
from megatron_ft.supervisor.incarnation import Incarnation
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.job_state import STATUS, JobState
from megatron_ft.supervisor.ledger import SUPERVISING
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.outcome import JobEnding, Outcome
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy
from megatron_ft.supervisor.recovery import Recovery
from megatron_ft.supervisor.recovery_policy import NoSparePolicy
from megatron_ft.supervisor.restore import RebuildError
from megatron_ft.supervisor.schedule import Pacing
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.summary import JobSummary
from megatron_ft.supervisor.watch import JobWatch

HOST_POLL_SECONDS = 1.0
STATUS_SECONDS = 1.0
"""Interval at which the job's summary is written to its state folder."""
LONGEST_WRITE_SECONDS = 600.0
LAST_WRITE_SECONDS = 2.0
SCHEDULER_SECONDS = 900.0
"""Time that a scheduler that starts nothing is tried again, before the job ends to be requeued."""


class Supervisor:
    """Runs one JobSpec through a Launcher.  ``observers`` get every event.

    ``hosts`` is where replacement hosts can be had, None: nowhere.  Making a supervisor starts
    nothing.
    """

    def __init__(
        self,
        spec: JobSpec,
        launcher: Launcher,
        state: JobState,
        hosts: ReplacementHosts | ReturningHosts | None = None,
    ) -> None:
        self.spec, self.state, self._launcher, self._hosts = spec, state, launcher, hosts
        self._job = job = JobContext.of(spec, launcher, state)
        self.observers, self.members = job.observers, job.members
        self.fleet, self.pump, self.standing = job.fleet, job.pump, job.standing
        self.trainers, self.encoder_group = job.trainers, job.encoder_group
        self.drains, self._disk = Drains(job), DiskRestores(spec, launcher)
        near = spec.settings.quarantine_iterations
        self._quarantine = QuarantinePolicy(state, job.pump, near, spec.checkpoint_dir)
        self.health = Health(job)
        self._recovery = Recovery(job, self._disk, self._quarantine, self.health)
        self._policy = NoSparePolicy(job, self._quarantine, hosts)
        self._emergency = EmergencyDrain(job, self.drains, self._recovery)
        self._pacing = Pacing(
            spec.settings.overhead_percent / 100,
            3600 * spec.settings.expected_mtbf_hours,
            self.observers,
        )
        self.evacuations = Evacuations(job, self.health)
        self._watch = JobWatch(job.fleet, spec.settings, spec.log_dir)
        self._evidence = EvidenceKeeper(job)
        self.ending = JobEnding(job, self.drains, self._emergency)
        job.fleet.listen(self._pacing.on_event)
        self.observers.subscribe(self._note_commit)
        self.summary = JobSummary(
            job.pump,
            lambda: {"spares": sorted(self.members.free_spares()), "watch": self._watch.report},
            lambda: {"exposed": self._alarm.rings},
            self.drains.report,
        )
        parity = bool(spec.scheme.parity_members)
        self._alarm = ExposureAlarm(spec.settings.exposed_iterations, parity=parity)
        self.summary.subscribe(self._judge_exposure)
        self._reached, self._budget = -1, spec.budget
        self._ended = self._away_since = 0.0

    async def run(self) -> Outcome:
        """Return when the training command has ended well on every rank, and how it has.

        Raises UnrecoverableError, NoSpareError or RestartBudgetError when the job cannot go
        on; SMPs and arenas then stay, so that the same command can be run again.
        """
        await self._prepare()
        status = asyncio.create_task(self._write_status())
        end: Outcome | None = None
        try:
            end = await self._train()
            return end
        except RestartBudgetError:
            await self._emergency.without_trainers()
            raise
        finally:
            status.cancel()
            await self._leave(end)

    async def _prepare(self) -> None:
        """Check what every incarnation needs, before anything is started."""
        spec, emit = self.spec, self.observers.emit
        shape = {"nodes": spec.nodes, "spares": spec.spares, "ranks": self.members.seats.ranks}
        text = ", ".join(f"{count} {name}" for name, count in shape.items())
        emit(SUPERVISING, f"{spec.name}: {text}", pid=os.getpid(), **shape)
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        await self._number_above_restore_from()
        if spec.scheme.parity_members:
            starter = self.encoder_group.processes.starter
            while (problem := await asyncio.to_thread(self._check_encoders)) is not None:
                await self._await_scheduler(problem)
            if starter.over_tcp:
                emit("transport", starter.describe())
        if spec.warm_start and (why := self.trainers.why_cold):
            emit("cold_start", f"trainers import anew at each start: {why}")
        saved = await self._quarantine.newest_saved()
        self._budget = replace(self._budget, highest_saved=saved)

    async def _train(self) -> Outcome:
        """One incarnation after the other, until all ranks have exited with 0."""
        while not isinstance(end := await self._run_incarnation(), Finished):
            if self.evacuations.stopping:
                # Trainers get the same SIGTERM; the last drain needs none, and cancels this.
                await asyncio.get_running_loop().create_future()
            await self.drains.abandon()
            await self._after(end)
        judged = self.ending.judge()
        if judged is not Outcome.FINISHED and self.evacuations.stopping:
            # Trainers got the same SIGTERM, see above.
            await asyncio.get_running_loop().create_future()
        return await self.ending.carry_out(judged)

    async def _leave(self, end: Outcome | None) -> None:
        """End all processes but SMPs that keep something."""
        await self.drains.abandon()
        self.encoder_group.drop_prepared()
        self.encoder_group.stop()
        await self.trainers.kill_all()
        self.trainers.end_hosts()
        retired = end is not None and end.frees
        if not (retired or end is Outcome.UNKNOWN or self.state.record.committed):
            await self.ending.leave_nothing()
        await self._put_status(self._status(ended=True), LAST_WRITE_SECONDS)
        await self.fleet.close(release=not retired)

    def _check_encoders(self) -> str | None:
        """Try an encoder world; the problem if the scheduler does not start one now."""
        try:
            self.encoder_group.processes.starter.check(self.spec.nodes)
        except MissingEnvironmentError as error:
            if not self._launcher.is_away(str(error)):
                raise
            return str(error)
        return None

    async def _await_scheduler(self, problem: str) -> None:
        """Wait before the next try, longer each time; SchedulerAwayError once it is too long."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        away = now - self._away_since
        if away > SCHEDULER_SECONDS:
            raise SchedulerAwayError(f"the scheduler starts nothing for {away:.0f} s: {problem}")
        pause = min(max(1.0, away), 30.0)
        text = f"the scheduler did not start it ({problem}); tried again in {pause:.0f} s"
        self.observers.emit("scheduler_away", text, seconds=pause)
        await asyncio.sleep(pause)

    async def _write_status(self) -> None:
        """Keep the summary in the state folder.  A disk that hangs or is full costs only that."""
        while True:
            began = time.monotonic()
            status = self._status()
            # What it costs grows with the job: it takes no more than a twentieth of the time.
            pause = max(STATUS_SECONDS, 20 * (time.monotonic() - began))
            await self._put_status(status, LONGEST_WRITE_SECONDS)
            await asyncio.sleep(pause)

    def _status(self, *, ended: bool = False) -> bytes:
        status = {
            "time": time.time(),
            "ended": ended,
            "summary": self.summary.publish(),
            "ranks": self.fleet.heartbeats.by_node(),
        }
        return json.dumps(status).encode()

    def _judge_exposure(self, summary: Mapping[str, Any]) -> None:
        if (ring := self._alarm.poll(time.monotonic(), summary)) is not None:
            cost = {"iterations": ring.iterations, "seconds": ring.seconds}
            self.observers.emit(ring.kind, ring.text, **cost)

    async def _put_status(self, status: bytes, seconds: float) -> None:
        write = partial(replace_file, self.state.folder / STATUS, status)
        with suppress(OSError, UntrustedFileError, asyncio.TimeoutError):
            await in_thread(write, seconds)

    async def _run_incarnation(self) -> End:
        """One incarnation, and what is to be done before its trainers are ended."""
        self.ending.begin_incarnation()
        try:
            end = await self._until_end()
            await self._evidence.observe(end)
            return end
        finally:
            # An incarnation that ended before it trained says nothing about how far training was.
            progress = max(self.fleet.progress.values(), default=-1)
            self._reached = progress if progress >= 0 else self._reached
            self._away_since = 0.0 if progress >= 0 else self._away_since
            self.pump.stop()
            self._watch.clock.failed()
            self._ended = time.monotonic()
            await self._end_trainers(trained=progress >= 0)
            self.encoder_group.stop()

    async def _until_end(self) -> End:
        """Recover and train; an error after which another start may succeed is a Failure."""
        emit = self.observers.emit
        try:
            return await self._recover_and_train()
        except NoSpareError as error:
            if self._policy.way == HOLD and await self._hold_for_hosts(error.missing):
                return Asked("replacement hosts have come")
            if not self._policy.again():
                raise
            return Asked("no replacement host has come")
        except RebuildError as error:
            self._quarantine.rebuild_failed(error.corrupt)
            emit("rebuild_failed", f"the rebuild failed: {error}")
            return RebuildFailed(f"rebuild: {error}")
        except LoadError as error:
            emit("load_failed", str(error))
            return LoadFailed(str(error))
        except NoRoomError as error:
            if not self.members.set_aside(error):
                raise
            return NoRoom(str(error), error.node)
        except StaleIncarnationError:
            # Somebody else leads the job now: continuing would be a second supervisor.
            raise
        except RegistrationError as error:
            emit("interrupted", str(error))
            return NotRegistered(str(error), final=error.none and not self.state.record.shards)
        except ControlPlaneError as error:
            emit("interrupted", str(error))
            return Interrupted(str(error), error.node, error=type(error))

    async def _end_trainers(self, *, trained: bool) -> None:
        """Kill all ranks but those that may restart in their process.

        Ranks that have not trained may be the cause of the failure.  The SMP of a silent node
        cannot prove that a rank there has let go of its arenas.
        """
        living = self.trainers.survivors() if trained else {}
        for node in self.fleet.silent_nodes(living):
            del living[node]
        await self.trainers.kill_all(but=[rank for ranks in living.values() for rank in ranks])

    async def _recover_and_train(self) -> End:
        try:
            plan = await self._recovery.run(self._reached, self.trainers.survivors())
        except NoSpareError as error:
            await self._policy.decide(error)
            if self._policy.way == SHRINK and shrink(self._job, error.admitted):
                return Asked("fewer nodes train")
            await self._emergency.run(error.admitted)
            raise
        self._policy.recovered()
        self.evacuations.restored(plan)
        return await Incarnation(
            self._job,
            plan,
            self._quarantine,
            self._pacing,
            self.drains,
            self._watch,
            self.evacuations,
        ).run()

    async def _hold_for_hosts(self, missing: int) -> bool:
        """Wait for ``missing`` hosts; True if all have come.  SMPs and memory stay meanwhile.

        False at once where the job's place has no source of them.
        """
        source, emit = self._hosts, self.observers.emit
        if source is None:
            return False
        self.encoder_group.stop()
        try:
            asked = await asyncio.to_thread(source.request, missing)
        except MegatronFTError as error:
            emit("hold_refused", f"no replacement host can be asked for: {error}")
            return False
        emit("holding", f"memory is held for up to {source.seconds:g} s, until there is {asked}")
        deadline = time.monotonic() + source.seconds
        while time.monotonic() < deadline:
            # Only the scheduler knows, and it notifies nobody.
            for node in await asyncio.to_thread(source.arrived):
                emit("host", f"{node} has come as a replacement host", node=node)
                missing -= 1
            if missing <= 0:
                return True
            await asyncio.sleep(HOST_POLL_SECONDS)
        await asyncio.to_thread(source.withdraw)
        emit("hold_timed_out", f"no replacement host came within {source.seconds:g} s")
        return False

    async def _after(self, end: Asked | Failure) -> None:
        """Charge a failure to the restart budget, which may end the job or ask for a wait."""
        cause, node = (end.cause, end.node) if isinstance(end, Failure) else ("", "")
        event = EndedEvent(
            reached=self._reached,
            ago=time.monotonic() - self._ended,
            cause=cause,
            node=node,
            asked=isinstance(end, Asked),
        )
        self.observers.emit(event, end.text)
        self._watch.clock.dead(end.text)
        if isinstance(end, Failure):
            await self._after_failure(end)

    async def _after_failure(self, failure: Failure) -> None:
        if self._launcher.is_away(failure.text):
            # Neither training nor a node is at fault.
            await self._await_scheduler(failure.text)
            return
        failure = await self._evidence.keep(failure)
        self._pacing.failed()
        if failure.training and (quiet := await self.fleet.quiet_nodes()):
            failure = NodeLost(failure.text, quiet[0])
        if failure.training and not failure.final and await self._quarantine.training_failed():
            self._budget = self._budget.from_other_start()
        committed = self.standing.committed
        iteration = -1 if committed is None else committed.iteration
        saved = await self._quarantine.newest_saved()
        self._budget = self._budget.after(failure, iteration, saved=saved)
        self.health.failed(failure)
        if self._budget.delay_seconds:
            delay = self._budget.delay_seconds
            text = f"waiting {delay:g} s before the next start"
            self.observers.emit(BackoffEvent(seconds=delay), text)
            await asyncio.sleep(delay)

    async def _number_above_restore_from(self) -> None:
        """Have incarnations numbered above those of the checkpoint that the user gave.

        A job that has run can do without it: an outage of its disk is reported then.
        """
        record = self.state.record
        try:
            older = await asyncio.to_thread(self._disk.highest_incarnation, record.job)
        except ConfigError as error:
            if not record.incarnation:
                raise
            self._disk.forget_restore_from()
            self.observers.emit("restore_from_unusable", f"--restore-from is not used: {error}")
        else:
            if older > record.incarnation:
                self.state.update(incarnation=older)

    def _note_commit(self, event: JobEvent) -> None:
        """Note the first commit; a start from nothing loses work then, so it must be asked for.

        SMPs have dropped shards of an older layout when one of the present is as safe.
        """
        if not isinstance(event.facts, CommittedEvent):
            return
        if not self.state.record.committed:
            self.state.update(committed=True)
        safe = event.facts.level == "protected" or not self.members.seats.scheme.parity_members
        if safe and self.state.record.sources:
            self.state.update(sources={}, source_seats={})


EXIT_INTERRUPTED = 130
EXIT_DRAINED = 13
EXIT_NOT_DRAINED = 14
EXIT_CONTINUE = 15
EXIT_SCHEDULER = 16

SAME_REQUEST_SECONDS = 2.0
"""scancel signals all processes of a batch step, and the batch script passes its signal on."""


class Stop:
    """Ends ``run``, the task of a supervisor.  ``code`` is the exit code once it has ended."""

    def __init__(self, supervisor: Supervisor, run: asyncio.Future[Outcome]) -> None:
        self.code = EXIT_INTERRUPTED
        self._supervisor, self._run = supervisor, run
        self._drain: asyncio.Task[None] | None = None
        self._asked = 0.0

    def at_once(self) -> None:
        self._run.cancel()

    def after_drain(self) -> None:
        """End when the newest committed snapshot is on disk or there was no time for it.

        Asked again after some seconds, or without a drain folder, end at once.
        """
        now = time.monotonic()
        if self._supervisor.spec.settings.drain_dir is None:
            self.at_once()
        elif self._drain is not None:
            if now - self._asked > SAME_REQUEST_SECONDS:
                self.at_once()
        else:
            self._asked = now
            self.code = EXIT_NOT_DRAINED
            self._supervisor.evacuations.stop()
            self._drain = asyncio.ensure_future(self._drain_first())

    async def _drain_first(self) -> None:
        seconds = self._supervisor.spec.settings.drain_stop_seconds
        if self._supervisor.ending.text:
            # All ranks have exited early: what they left is being drained already.
            await asyncio.wait({self._run}, timeout=seconds)
        elif await self._supervisor.drains.last(seconds):
            self.code = EXIT_DRAINED
        self.at_once()
