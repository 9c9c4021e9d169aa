"""One job from its first start to its end: incarnations, failures, and what comes between.

The supervisor starts processes and decides who replaces whom; the coordinator inside it
talks to the SMPs.  When it is killed, SMPs and arenas stay, and the same command run
again takes them over.

Hosts that a running job may get in place of lost ones, and waiting for them.

A job without a spare need not stop: what memory can serve is on disk by then (salvage.py) and
stays in memory, so a host that comes in time is rebuilt from parity like any spare.

What SIGTERM does to a job: what is committed goes to disk, then all ends.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from megatron_ft.core.errors import (
    ConfigError,
    ControlPlaneError,
    MegatronFTError,
    NoRoomError,
    RegistrationError,
    RestartBudgetError,
    StaleIncarnationError,
)
from megatron_ft.core.process_tools import in_thread
from megatron_ft.launchers.launcher import HostSource
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.budget import Failure
from megatron_ft.supervisor.disk_restore import LoadError
from megatron_ft.supervisor.failure import NODE_LOST
from megatron_ft.supervisor.foresight import folder_of, newest_saved
from megatron_ft.supervisor.incarnation import Incarnation
from megatron_ft.supervisor.job_parts import JobParts
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.no_spare import salvage_without_trainers
from megatron_ft.supervisor.restore import RebuildError

LOOK_SECONDS = 1.0


async def hold_for_hosts(parts: JobParts, missing: int) -> bool:
    """Wait for ``missing`` hosts; whether all have come.  SMPs and memory stay meanwhile.

    False at once where the job's place has no source of them.
    """
    source, tell = parts.hosts, parts.observers.tell
    if source is None:
        return False
    parts.world.stop()
    try:
        asked = await asyncio.to_thread(source.request, missing)
    except MegatronFTError as error:
        tell("hold_refused", f"no replacement host can be asked for: {error}")
        return False
    tell("holding", f"memory is held for up to {source.seconds:g} s, until there is {asked}")
    if await _all_come(parts, source, missing):
        return True
    await asyncio.to_thread(source.withdraw)
    tell("held_in_vain", f"no replacement host came within {source.seconds:g} s")
    return False


async def _all_come(parts: JobParts, source: HostSource, missing: int) -> bool:
    deadline = time.monotonic() + source.seconds
    while time.monotonic() < deadline:
        # Only the scheduler knows, and it tells nobody.
        come = await asyncio.to_thread(source.arrived)
        for node in come:
            parts.observers.tell("host", f"{node} has come as a replacement host", node=node)
        missing -= len(come)
        if missing <= 0:
            return True
        await asyncio.sleep(LOOK_SECONDS)
    return False


NOTES_SECONDS = 2.0
"""So often a supervisor looks whether its notes are still there."""
NOTES_TIMEOUT_SECONDS = 10.0
"""Longest wait for the file system that holds them."""


class Supervisor(JobParts):
    """Runs one JobSpec through a Launcher.  ``observers`` are told every event."""

    async def run(self) -> None:
        """Return when the training command has ended well on every rank.

        Raises UnrecoverableError, NoSpareError or RestartBudgetError when the job cannot go
        on; SMPs and arenas then stay, so that the same command can be run again.
        """
        self.spec.log_dir.mkdir(parents=True, exist_ok=True)
        await self._number_above_restore_from()
        if self.spec.scheme.parity_members:
            starter = self.world.encoders.starter
            await asyncio.to_thread(starter.check, self.spec.nodes)
            if starter.over_tcp:
                self.observers.tell("transport", starter.describe())
        saved = await newest_saved(folder_of(self.spec))
        self.budget = replace(self.budget, highest_saved=saved)
        keeping = asyncio.create_task(self._keep_notes())
        try:
            while (failure := await self._live()) is not None:
                await self.drains.abandon()
                await self._after(failure)
            await self.drains.settle()
            await self._retire()
        except RestartBudgetError:
            await salvage_without_trainers(self)
            raise
        finally:
            keeping.cancel()
            await self.drains.abandon()
            self.world.stop()
            self.warm_spares.end()
            await self.trainers.kill_all()
            await self.coordinator.close()

    async def _number_above_restore_from(self) -> None:
        """Have incarnations numbered above those of the checkpoint that the user gave.

        A job that has run can do without it: an outage of its disk is reported then.
        """
        record = self.state.record
        try:
            older = await asyncio.to_thread(self.disk.highest_incarnation, record.job)
        except ConfigError as error:
            if not record.incarnation:
                raise
            self.disk.forget_restore_from()
            self.observers.tell("restore_from_unusable", f"--restore-from is not used: {error}")
        else:
            if older > record.incarnation:
                self.state.update(incarnation=older)

    async def _keep_notes(self) -> None:
        """Write the job's notes again if they were removed: without them memory has no key."""
        told = ""
        while True:
            await asyncio.sleep(NOTES_SECONDS)
            try:
                # Beside the event loop, which renews leases: a network file system may hang.
                missing = await in_thread(self.state.is_missing, NOTES_TIMEOUT_SECONDS)
                text = f"{self.state.folder} was removed; its notes were written again"
                text = text if missing and self.state.restore() else ""
            except StaleIncarnationError as error:
                # Repeated every time: a recovery that begins meanwhile clears the signal.
                text = f"the job's notes: {error}"
                self.coordinator.supersede(str(error))
            except (ControlPlaneError, OSError) as error:
                text = f"the job's notes: {error}"
            except asyncio.TimeoutError:
                text = f"{self.state.folder} does not answer"
            if text and text != told:
                self.observers.tell("notes_removed", text)
            told = text

    async def _live(self) -> Failure | None:
        """One incarnation; None when training has finished."""
        try:
            return await Incarnation(self).run()
        except NoSpareError as error:
            if not await hold_for_hosts(self, error.missing):
                raise
            return Failure("replacement hosts have come", asked=True)
        except RebuildError as error:
            self.notes.rebuild_failed(error.corrupt)
            self.observers.tell("rebuild_failed", f"the rebuild failed: {error}")
            return Failure(f"rebuild: {error}", "a rebuild failed")
        except LoadError as error:
            self.observers.tell("load_failed", str(error))
            return Failure(str(error), "a checkpoint could not be loaded into memory")
        except NoRoomError as error:
            if not self.members.set_aside(error):
                raise
            return Failure(str(error), "a node has no room", error.node)
        except StaleIncarnationError:
            # Somebody else leads the job now: going on would be a second coordinator.
            raise
        except RegistrationError as error:
            self.observers.tell("interrupted", str(error))
            never = error.none and not self.registered and not self.state.record.shards
            return Failure(str(error), "ranks did not register", training=True, final=never)
        except ControlPlaneError as error:
            self.observers.tell("interrupted", str(error))
            return Failure(str(error), type(error).__name__, error.node)
        finally:
            # An incarnation that ended before it trained says nothing about how far training was.
            progress = max(self.coordinator.progress.values(), default=-1)
            self.reached = progress if progress >= 0 else self.reached
            self.coordinator.stop_snapshots()
            self.watch.clock.failed()
            await self.trainers.kill_all()
            self.world.stop()

    async def _after(self, failure: Failure) -> None:
        self.watch.clock.dead(failure.text)
        if failure.asked:
            return
        self.pacing.failed()
        if failure.training and (quiet := await self.coordinator.quiet_nodes()):
            failure = Failure(failure.text, NODE_LOST, quiet[0])
        if failure.training and await self.distrust.training_failed():
            self.budget = self.budget.from_other_start()
        committed = self.coordinator.committed
        iteration = -1 if committed is None else committed[1]
        saved, spare = await newest_saved(folder_of(self.spec)), bool(self.members.free_spares())
        self.budget = self.budget.answered(self.replaced)
        self.budget = self.budget.after(failure, iteration, saved=saved, spare=spare)
        if self.budget.delay_seconds:
            delay = self.budget.delay_seconds
            self.observers.tell("backoff", f"waiting {delay:g} s before the next start")
            await asyncio.sleep(delay)

    async def _retire(self) -> None:
        """The job is done: free the memory.  A node that cannot be told spoils nothing."""
        request = m.Retire(self.coordinator.incarnation, remove_arenas=True)
        try:
            await self.coordinator.ask_all({node: request for node in self.coordinator.links})
        except MegatronFTError as error:
            self.observers.tell(
                "not_freed", f"memory may be left behind, `megatron-ft clean` frees it: {error}"
            )
        self.observers.tell("finished", "training finished; the memory is free again")


EXIT_INTERRUPTED = 130
EXIT_DRAINED = 13
EXIT_NOT_DRAINED = 14


class Stop:
    """Ends ``run``, the task of a supervisor.  ``code`` is the exit code once it has ended."""

    def __init__(self, supervisor: Supervisor, run: asyncio.Future[None]) -> None:
        self.code = EXIT_INTERRUPTED
        self._supervisor, self._run = supervisor, run
        self._drain: asyncio.Task[None] | None = None

    def at_once(self) -> None:
        """End now; snapshots stay in memory."""
        self._run.cancel()

    def after_drain(self) -> None:
        """End when the newest committed snapshot is on disk or there was no time for it.

        Asked again, or without a drain folder, end at once.
        """
        if self._drain is not None or self._supervisor.spec.settings.drain_dir is None:
            self.at_once()
        else:
            self.code = EXIT_NOT_DRAINED
            self._drain = asyncio.ensure_future(self._drain_first())

    async def _drain_first(self) -> None:
        seconds = self._supervisor.spec.settings.drain_stop_seconds
        if await self._supervisor.drains.last(seconds):
            self.code = EXIT_DRAINED
        self.at_once()
