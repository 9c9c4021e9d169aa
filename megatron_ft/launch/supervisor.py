"""One job from its first start to its end: lives, failures, and what comes between.

The supervisor starts processes and decides who replaces whom; the coordinator inside it
talks to the SMPs.  When it is killed, SMPs and arenas stay, and the same command run
again takes them over.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Any

from megatron_ft.coordinator.coordinator import Coordinator
from megatron_ft.coordinator.cycle import SnapshotCycle
from megatron_ft.coordinator.events import JobEvent, Observers
from megatron_ft.coordinator.plan import stripe_orders
from megatron_ft.coordinator.recovery import (
    Admitted,
    DiskSource,
    RebuildError,
    Restore,
    describe_restore,
    restore,
)
from megatron_ft.coordinator.registration import Roll, make_arenas, settle_stripes, wait_for_all
from megatron_ft.disk.drained import Choice
from megatron_ft.disk.native import newest_checkpoint
from megatron_ft.environment import RESTORE
from megatron_ft.errors import (
    ControlPlaneError,
    MegatronFTError,
    StaleIncarnationError,
    UnrecoverableError,
    error_class,
)
from megatron_ft.identity import Ancestor, SnapshotId
from megatron_ft.launch.budget import RestartBudget
from megatron_ft.launch.disk_restore import DiskRestores, LoadError, lineage_before
from megatron_ft.launch.distrust import Distrust
from megatron_ft.launch.drains import Drains
from megatron_ft.launch.fleet import EncoderWorld, TrainerExit, TrainerFleet, last_lines
from megatron_ft.launch.job_state import JobState, command_digest
from megatron_ft.launch.launcher import Launcher
from megatron_ft.launch.membership import Membership, NoSpareError
from megatron_ft.launch.salvage import SALVAGE_SECONDS, doubled_up
from megatron_ft.launch.spec import JobSpec
from megatron_ft.launch.world_keeper import WorldKeeper
from megatron_ft.recovery.decide import Decision, decide
from megatron_ft.recovery.lineage import extend
from megatron_ft.smp import messages as m
from megatron_ft.smp.security import JobKeys


@dataclass(frozen=True)
class Failure:
    """Why a life ended.  ``signature`` is the same text for the same cause.

    ``training`` says that the training command itself failed: not a node, nor somebody who
    killed it.  ``asked`` that the user wanted it.
    """

    signature: str
    training: bool = False
    asked: bool = False


class Supervisor:
    """Runs one JobSpec through a Launcher.  ``observers`` are told every event."""

    def __init__(self, spec: JobSpec, launcher: Launcher, state: JobState) -> None:
        self.spec, self.launcher, self.state = spec, launcher, state
        self.observers = Observers()
        self.trainers = TrainerFleet(launcher, spec)
        self.world = WorldKeeper(EncoderWorld(launcher, spec))
        self.coordinator = Coordinator(
            JobKeys.derive(state.record.secret), self.observers, self.world.end_world, spec.timing
        )
        self.world.serve(self.coordinator)
        self.coordinator.scrub_percent = spec.scrub_percent
        self.members = Membership(spec, launcher, state, self.coordinator)
        self.drains = Drains(
            spec, launcher, state.record.job, self.coordinator, self.members.spares_gone
        )
        self.disk = DiskRestores(spec, launcher)
        self._reached = -1
        self._corrupt: set[tuple[str, SnapshotId]] = set()
        self._budget = RestartBudget()
        self.distrust = Distrust(
            state, self.coordinator, spec.world_size, spec.quarantine_iterations
        )
        self._unfit: m.Unfit | None = None
        self.coordinator.listeners += [
            self._note_corruption,
            self._note_rebuilt,
            self._note_unfit,
        ]
        self.observers.add(self._note_first_commit)

    async def run(self) -> None:
        """Return when the training command has ended well on every rank.

        Raises UnrecoverableError, NoSpareError or RestartBudgetError when the job cannot go
        on; SMPs and arenas then stay, so that the same command can be run again.
        """
        self.spec.log_dir.mkdir(parents=True, exist_ok=True)
        older = await asyncio.to_thread(self.disk.highest_life, self.state.record.job)
        if older > self.state.record.incarnation:
            self.state.update(incarnation=older)
        if self.spec.scheme.parity_members:
            await asyncio.to_thread(self.launcher.check_world, self.spec.nodes)
        try:
            while (failure := await self._live()) is not None:
                await self.drains.abandon()
                await self._after(failure)
            await self.drains.settle()
            await self._retire()
        finally:
            await self.drains.abandon()
            self.world.stop()
            await self.trainers.kill_all()
            await self.coordinator.close()

    async def _live(self) -> Failure | None:
        """One incarnation; None when training has finished."""
        try:
            return await self._recover_and_train()
        except RebuildError as error:
            if error.corrupt and self.coordinator.restoring is not None:
                self._corrupt.add((error.corrupt, self.coordinator.restoring))
            self.observers.tell("rebuild_failed", f"the rebuild failed: {error}")
            return Failure(f"rebuild: {error}")
        except LoadError as error:
            self.observers.tell("load_failed", str(error))
            return Failure(str(error))
        except StaleIncarnationError:
            # Somebody else leads the job now: going on would be a second coordinator.
            raise
        except ControlPlaneError as error:
            self.observers.tell("interrupted", str(error))
            return Failure(str(error))
        finally:
            # A life that ended before it trained says nothing about how far training was.
            progress = max(self.coordinator.progress.values(), default=-1)
            self._reached = progress if progress >= 0 else self._reached
            self.coordinator.stop_snapshots()
            await self.trainers.kill_all()
            self.world.stop()

    async def _after(self, failure: Failure) -> None:
        if failure.asked:
            return
        committed = self.coordinator.committed
        iteration = -1 if committed is None else committed[1]
        rejected = failure.training and await self.distrust.training_failed()
        if rejected:
            self._budget = self._budget.from_other_start()
        self._budget = self._budget.after(failure.signature, iteration)
        if self._budget.delay_seconds:
            delay = self._budget.delay_seconds
            self.observers.tell("backoff", f"waiting {delay:.0f} s before the next start")
            await asyncio.sleep(delay)

    async def _recover_and_train(self) -> Failure | None:
        plan, admitted = await self._new_incarnation()
        await self._restore(plan, admitted)
        self.distrust.begin(plan.decision, plan.lineage)
        roll = Roll(self.spec.world_size)
        self.coordinator.listeners.append(roll.hear)
        try:
            if self.spec.scheme.parity_members and not self.world.wanted:
                self.world.start(plan.active)
            self.trainers.start(
                plan.active, plan.incarnation, {RESTORE: self.distrust.source(plan.decision)}
            )
            self.observers.tell("trainers_started", f"{self.spec.world_size} trainers started")
            return await self._watch(asyncio.create_task(self._begin_snapshots(roll, plan)))
        finally:
            self.coordinator.listeners.remove(roll.hear)

    async def _restore(self, plan: Restore, admitted: tuple[str, ...]) -> None:
        work = restore(
            self.coordinator,
            plan,
            admitted,
            lambda: self.world.start(plan.active),
            lambda disk: self.disk.load(disk, plan),
        )
        await self.members.smps.while_all_run(work)

    async def _new_incarnation(self) -> tuple[Restore, tuple[str, ...]]:
        members = self.members
        admitted = await members.admit_all()
        self.distrust.admitted()
        try:
            members.replace_lost(admitted)
        except NoSpareError:
            await self._salvage(admitted)
            raise
        self.state.update(
            incarnation=self.coordinator.incarnation,
            active=tuple(members.active),
            scheme=str(self.spec.scheme),
            command_digest=command_digest(self.spec.command),
        )
        count = len(self.state.record.shards) or None
        memory = self._decide(admitted, count)
        choice = await self.disk.look(memory, self.state.record)
        decision, source, lineage = self._settle(memory, choice)
        self.state.update(lineage=lineage)
        plan = Restore(
            decision=decision,
            places=members.places(),
            active=tuple(members.active),
            incarnation=self.coordinator.incarnation,
            lineage=lineage,
            sizes=self.spec.sizes,
            disk=source,
        )
        self._tell_restore(plan, memory, choice)
        return plan, tuple(admitted.inventories)

    @property
    def _damaged(self) -> set[tuple[str, SnapshotId]]:
        return self._corrupt | self.coordinator.repairs.lost

    def _decide(self, admitted: Admitted, count: int | None) -> Decision:
        """What memory can serve."""
        return decide(
            self.members.owned(admitted),
            shard_count=count,
            corrupt=self._damaged,
            quarantine=self.distrust.quarantine,
        )

    async def _salvage(self, admitted: Admitted) -> None:
        """The job is about to stop for want of a spare: drain what memory can serve before."""
        there = [node for node in self.members.active if node in admitted.inventories]
        if self.spec.drain_dir is None or not there or not self.state.record.shards:
            return
        count = len(self.state.record.shards)
        memory = self._decide(admitted, count)
        if memory.snapshot is None:
            return
        active = doubled_up(self.members.active, there)
        lineage = self._lineage(memory)
        self.state.update(incarnation=self.coordinator.incarnation, lineage=lineage)
        plan = Restore(
            decision=memory,
            places=self.members.places(active),
            active=tuple(there),
            incarnation=self.coordinator.incarnation,
            lineage=lineage,
            sizes=self.spec.sizes,
        )
        self.observers.tell(
            "salvaging",
            f"no spare is left: draining before the job stops; {describe_restore(plan)[0]}",
        )
        try:
            await self._restore(plan, tuple(admitted.inventories))
            self.drains.begin(plan.places, self.state.record.shards, lineage, memory.iteration)
            await self.drains.last(SALVAGE_SECONDS)
        except MegatronFTError as error:
            self.observers.tell("salvage_failed", f"memory could not be drained: {error}")

    def _settle(
        self, memory: Decision, choice: Choice
    ) -> tuple[Decision, DiskSource | None, tuple[Ancestor, ...]]:
        """What is restored, what of it from disk, and the lineage of this life."""
        incarnation, taken = self.coordinator.incarnation, choice.taken
        if taken is None:
            if memory.snapshot is None:
                self._accept_loss(memory, choice)
            return memory, None, self._lineage(memory)
        decision, source = self.disk.decision(taken, memory, self.members.active, self._damaged)
        older = lineage_before(taken, self.state.record)
        self.state.update(shards=taken.seats)
        self.coordinator.durable = (taken.manifest.snapshot, decision.iteration)
        return decision, source, extend(older, incarnation, decision.snapshot)

    def _accept_loss(self, decision: Decision, choice: Choice) -> None:
        """Neither memory nor what was drained can serve.  Go on otherwise if that is allowed."""
        if self.state.record.committed:
            self._explain_loss("; ".join([decision.explanation, *choice.reasons]))
        self.coordinator.committed = self.coordinator.protected = None
        self.state.update(committed=False, shards={})

    def _explain_loss(self, reason: str) -> None:
        checkpoint = newest_checkpoint(self.spec.checkpoint_dir)
        unwanted = self.distrust.reason_against(checkpoint)
        if unwanted:
            reason, checkpoint = f"{reason}; {checkpoint}: {unwanted}", None
        if checkpoint is not None:
            self.observers.tell("from_disk", f"memory lost ({reason}); starting from {checkpoint}")
        elif self.spec.from_scratch:
            self.observers.tell("from_scratch", f"memory lost ({reason}); starting from scratch")
        else:
            where = self.spec.checkpoint_dir or "no --checkpoint-dir was given"
            raise UnrecoverableError(
                f"no snapshot can be served: {reason}. There is no complete checkpoint on disk "
                f"either ({where}). To start again from nothing, add --from-scratch"
            )

    def _lineage(self, decision: Decision) -> tuple[Ancestor, ...]:
        arenas = [holding.arena for holding in decision.holdings.values()]
        newest = max(arenas, key=lambda arena: arena.incarnation, default=None)
        older = () if newest is None else newest.lineage
        return extend(older, self.coordinator.incarnation, decision.snapshot)

    def _tell_restore(self, plan: Restore, memory: Decision, choice: Choice) -> None:
        if plan.decision.snapshot is None:
            return
        text, source = describe_restore(plan)
        lost = max(0, self._reached - plan.decision.iteration)
        if self._reached >= 0:
            text += f"; {lost} iterations are lost"
        if plan.disk is not None:
            reasons = [
                f"memory: {memory.explanation}" if memory.explanation else "",
                *choice.reasons,
            ]
            text += "".join(f"; {reason}" for reason in reasons if reason)
        self.observers.tell(
            "restoring",
            text,
            iteration=plan.decision.iteration,
            source=source,
            lost=list(plan.lost()),
            iterations_lost=lost if self._reached >= 0 else None,
        )

    async def _begin_snapshots(self, roll: Roll, plan: Restore) -> None:
        sizes = self.spec.sizes
        await wait_for_all(roll, self.spec.register_timeout)
        stored = plan.decision.stripes if plan.decision.snapshot is not None else ()
        stripes = settle_stripes(roll, stored, self.spec.scheme, sizes)
        places = roll.places()
        await make_arenas(self.coordinator, stripes, places, plan.lineage, sizes)
        self.state.update(shards=roll.seats())
        orders = stripe_orders(stripes, places, plan.active, sizes)
        first = max(0, plan.decision.iteration)
        cycle = SnapshotCycle(plan.incarnation, places, orders, roll.interval, first)
        self.observers.tell("training", "training")
        self.coordinator.start_snapshots(cycle)
        self.drains.begin(places, roll.seats(), plan.lineage, first)

    async def _watch(self, beginning: asyncio.Task[None]) -> Failure | None:
        """Until this life ends.  SMPs and encoders that die alone are replaced meanwhile."""
        trainers = asyncio.create_task(self.trainers.ended())
        silent = asyncio.create_task(self.coordinator.silent.wait())
        rewind = asyncio.create_task(self.coordinator.rewind_asked.wait())
        try:
            while True:
                smp = asyncio.create_task(self.members.smps.first_exit())
                waits: set[asyncio.Task[Any]] = {trainers, silent, smp, rewind}
                waits |= set() if beginning.done() else {beginning}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                dead = smp.result() if smp.done() else ""
                smp.cancel()
                if trainers.done():
                    return self._trainers_ended(trainers.result())
                if rewind.done():
                    return Failure(self.distrust.rewind(), asked=True)
                if silent.done():
                    failure = self._silent()
                    if failure is not None:
                        return failure
                    silent = asyncio.create_task(self.coordinator.silent.wait())
                if beginning.done():
                    beginning.result()
                reason = await self.members.replace_smp(dead) if dead else ""
                if reason:
                    return Failure(reason)
        finally:
            for task in (trainers, silent, rewind, beginning):
                task.cancel()

    def _silent(self) -> Failure | None:
        self.coordinator.silent.clear()
        lost = self.coordinator.silent_nodes(list(self.coordinator.links))
        if not lost or self.members.without(lost):
            return None
        self.observers.tell("silent", f"no heartbeat from {', '.join(lost)}")
        return Failure(f"no heartbeat from {', '.join(lost)}")

    def _trainers_ended(self, first: TrainerExit) -> Failure | None:
        if first.finished:
            return None
        if self._unfit is not None:
            # The same command would fail the same way; the snapshot stays for the right one.
            raise error_class(self._unfit.error)(self._unfit.reason)
        rank, node, status = first.rank, first.node, first.status
        how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
        self.observers.tell(
            "trainer_died", f"rank {rank} on {node} {how}", rank=rank, node=node, status=status
        )
        if status > 0:
            log = self.trainers.log_of(rank)
            self.observers.tell("log", f"end of {log}:\n{last_lines(log)}")
        outside = -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        its_own = not outside and self.launcher.reachable(node)
        return Failure(f"rank {rank} {how}", training=its_own)

    def _note_corruption(self, event: m.Event) -> None:
        if isinstance(event.body, m.CorruptShard):
            self._corrupt.add((event.body.shard_id, event.body.snapshot))
            self.observers.tell(
                "corrupt",
                f"{event.body.blocks} blocks of {event.body.shard_id} fail their digests; the "
                "shard counts as lost",
            )

    def _note_rebuilt(self, event: m.Event) -> None:
        if isinstance(event.body, m.Rebuilt):
            known = event.body.shard_id, event.body.snapshot
            self._corrupt.discard(known)
            self.coordinator.repairs.lost.discard(known)

    def _note_unfit(self, event: m.Event) -> None:
        if isinstance(event.body, m.Unfit):
            self._unfit = event.body

    def _note_first_commit(self, event: JobEvent) -> None:
        """From here on a start from nothing would lose work, so it has to be asked for."""
        if event.kind == "committed" and not self.state.record.committed:
            self.state.update(committed=True)

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
