"""One incarnation of a job: start trainers, register them, watch until something ends."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.environment import RESTORE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.identity import SHRINK
from megatron_ft.core.process_tools import last_lines, last_word
from megatron_ft.core.startup import REFUSED
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.encoder_world import WorldKeeper
from megatron_ft.supervisor.ends import (
    NEVER_STARTED,
    RERUN_CODES,
    ArenaRemoved,
    Asked,
    End,
    Failure,
    Finished,
    NodeLost,
    ReplicasDiffer,
    SmpLost,
    TrainerFailed,
    TrainerRefused,
    TrainerStopped,
)
from megatron_ft.supervisor.evacuation import Evacuations
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.orders import create_requests, stripe_orders
from megatron_ft.supervisor.processes import TrainerExit, TrainerFleet
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.renewal import ArenaRenewal
from megatron_ft.supervisor.restore import (
    RestorePlan,
    make_arenas,
    make_sources,
    reshape,
    return_sources,
)
from megatron_ft.supervisor.schedule import Pacing
from megatron_ft.supervisor.slot_choice import USUAL, SlotChoice, choose_slots
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.watch import JobWatch

log = logging.getLogger(__name__)


MOST_INTERVALS = 10
"""A restart for the sake of a new arena repeats at most the iterations of so many intervals."""


@dataclass(kw_only=True)
class Incarnation:
    """Runs trainers once from what a recovery has restored; the caller ends them afterwards.

    ``reached`` is the last iteration before the failure that led here, -1 if none is known.
    """

    plan: RestorePlan
    reached: int
    spec: JobSpec
    launcher: Launcher
    state: JobState
    coordinator: Coordinator
    members: Membership
    trainers: TrainerFleet
    world: WorldKeeper
    quarantine: QuarantinePolicy
    pacing: Pacing
    drains: Drains
    watch: JobWatch
    evacuations: Evacuations
    registration: Registration = field(init=False)
    renewal: ArenaRenewal = field(init=False)
    declined: bool = field(init=False, default=False)
    refusal: MegatronFTError | None = field(init=False, default=None)
    """Why this incarnation cannot train; its trainers end with the same error."""

    def __post_init__(self) -> None:
        self.registration = Registration(self.members.ranks, self.spec.domains)
        self.renewal = ArenaRenewal(
            plan=self.plan,
            state=self.state,
            coordinator=self.coordinator,
            members=self.members,
            registration=self.registration,
            drains=self.drains,
        )

    async def run(self) -> End:
        """Train until something ends it; errors of nodes and of memory are raised."""
        plan = self.plan
        listeners = [self.registration.on_event, self._on_restartable, self._on_declined]
        with self.coordinator.listening(*listeners, self.renewal.on_event):
            if (self._encodes() or plan.reshaped) and not self.world.wanted:
                self.world.start(plan.nodes)
            behind = self.reached if self.reached > plan.decision.iteration else -1
            _, source = plan.describe()
            self.watch.begin_incarnation(self.members.ranks, plan.decided, behind, source)
            restored = self.quarantine.source(plan.decision)
            await self._start_trainers({RESTORE: restored})
            end = await self._watch(asyncio.create_task(self._begin_snapshots()))
        if not isinstance(end, Finished) and end.idle:
            self.watch.clock.detected(end.idle)
        return end

    async def _start_trainers(self, extra: Mapping[str, str]) -> None:
        """Let survivors train again, and start the other ranks."""
        plan, trainers = self.plan, self.trainers
        kept = trainers.in_place(plan.active, plan.kept)
        await trainers.kill_all(but=kept)
        await self.coordinator.ask_all(trainers.start(plan.active, plan.incarnation, extra, kept))
        text = f"{self.members.ranks - len(kept)} trainers started{self._shape()}"
        text += f", {len(kept)} restart in process" if kept else ""
        self._emit("trainers_started", text, in_process=sorted(kept))

    async def _begin_snapshots(self) -> None:
        """Await all ranks, make arenas, let trainers begin, and permit snapshots."""
        spec, plan, registration = self.spec, self.plan, self.registration
        await registration.wait(spec.settings.register_timeout_seconds, self._on_late_ranks)
        self.watch.clock.registered(registration.starts())
        for why, ranks in registration.cold().items():
            self._emit("cold_start", f"ranks {sorted(ranks)} started cold: {why}", ranks=ranks)
        restored = plan.decision.snapshot is not None and not plan.reshaped
        stored = plan.decision.stripes if restored else ()
        places = registration.places()
        nodes = sorted(set(places.values()))
        try:
            other = plan.reshaped and plan.places.keys() != places.keys()
            shrinks = spec.settings.on_no_spare == SHRINK
            rule = registration.rank_rule(needed=shrinks or other)
            if spec.arguments_for(len(plan.active)):
                rule = self.state.record.rank_rule  # that of the command without them
            stripes = registration.stripes(stored, self.members.scheme, spec.block_bytes)
            if plan.reshaped:
                await make_sources(self.coordinator, plan)
            slots = await self._choose_slots(stripes, places)
            requests = create_requests(stripes, plan.incarnation, plan.lineage, slots.count)
            await make_arenas(self.coordinator, requests, places)
            if plan.reshaped and not self.declined:
                await reshape(self.coordinator, plan, places)
        except MegatronFTError as error:
            # Noted first: trainers may have ended before all nodes have answered.
            self.refusal = error
            refusal = m.ArenasReady(plan.incarnation, error)
            await self.coordinator.ask_all(dict.fromkeys(nodes, refusal))
            if plan.reshaped:
                await return_sources(self.coordinator, plan)
            raise
        await self.coordinator.ask_all(dict.fromkeys(nodes, m.ArenasReady(plan.incarnation)))
        self.state.update(shards=registration.placements(), rank_rule=rule)
        if plan.nodes != plan.active:
            self._narrow_world()
        first = max(0, plan.decision.iteration)
        schedule = self.pacing.begin(registration.interval, first)
        self._emit("training", "training", iteration=first)
        orders = stripe_orders(stripes, places, plan.active)
        self.renewal.begin(stripes, (slots.count, spec.settings.fixed_slots or USUAL))
        judge = partial(self.coordinator.replicas.judge, places)
        cycle = SnapshotCycle(plan.incarnation, places, orders, schedule, judge)
        self.coordinator.start_snapshots(cycle)
        self.drains.begin(places, registration.placements(), plan.lineage, first)
        self.drains.warn_of_slots(slots)
        await self._share_imports(nodes[0])

    async def _choose_slots(
        self, stripes: tuple[StripeState, ...], places: dict[str, str]
    ) -> SlotChoice:
        """The slots of this incarnation's arenas: those of arenas that are there, or chosen."""
        if self.plan.slots.count and not self.plan.reshaped:
            return self.plan.slots
        spares = self.members.free_spares()
        return await choose_slots(self.coordinator, self.spec, stripes, places, spares)

    def _shape(self) -> str:
        """The arguments of --shapes with which ranks train, as the end of a sentence."""
        nodes = len(self.plan.active)
        words = shlex.join(self.spec.arguments_for(nodes))
        return f" with {words}, which --shapes gives for {nodes} nodes" if words else ""

    def _encodes(self) -> bool:
        """True if snapshots of this incarnation get parity."""
        return bool(self.members.scheme.parity_members)

    def _narrow_world(self) -> None:
        """Replace an encoder world that a reshape needed on more nodes than train."""
        if self._encodes():
            self.world.start(self.plan.active)
        else:
            self.world.stop()

    async def _share_imports(self, node: str) -> None:
        """Have the hosts of spares import what the first trainer of a node has imported.

        A spare that does not hear of it starts its ranks later by these imports.
        """
        spares = self.members.free_spares()
        if self.trainers.why_cold or not spares:
            return
        request = m.ImportsRequest(self.plan.incarnation)
        try:
            noted = (await self.coordinator.ask_all({node: request}))[node]
            await self.coordinator.ask_all(dict.fromkeys(spares, noted))
        except MegatronFTError as error:
            log.warning("trainer hosts of spares do not know what to import: %s", error)

    async def _watch(self, beginning: asyncio.Task[None]) -> End:
        """Watch until this incarnation ends; meanwhile replace SMPs and encoders that die alone."""
        coordinator, smps = self.coordinator, self.members.smps
        trainers = asyncio.create_task(self.trainers.ended())
        silent = asyncio.create_task(coordinator.silent.wait())
        rewind = asyncio.create_task(coordinator.rewind_asked.wait())
        hang = asyncio.create_task(self.watch.until_hang())
        move = asyncio.create_task(self.evacuations.until_due())
        differ = asyncio.create_task(coordinator.replicas.differ.wait())
        missing = asyncio.create_task(self._until_arena_missing(beginning))
        renewal = asyncio.create_task(self.renewal.serve())
        try:
            while True:
                smp = asyncio.create_task(smps.ended())
                waits: set[asyncio.Task[Any]] = {trainers, silent, smp, rewind, hang, move}
                waits |= {differ, missing, renewal}
                waits |= set() if beginning.done() else {beginning}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                dead = smp.result() if smp.done() else []
                smp.cancel()
                if differ.done():
                    return await self._replicas_differ()
                if trainers.done():
                    return await self._trainers_ended(trainers.result())
                if rewind.done():
                    return Asked(self.quarantine.rewind())
                if move.done():
                    return move.result()
                if missing.done():
                    return missing.result()
                if renewal.done():
                    renewal.result()
                if hang.done():
                    return hang.result()
                if silent.done():
                    if (failure := self.members.on_silence()) is not None:
                        return failure
                    silent = asyncio.create_task(coordinator.silent.wait())
                if beginning.done():
                    beginning.result()
                if reason := await self.members.replace_smps(dead):
                    return SmpLost(reason, dead[0])
        finally:
            tasks = (trainers, silent, rewind, hang, move, differ, missing, renewal, beginning)
            for task in tasks:
                task.cancel()

    async def _trainers_ended(self, first: TrainerExit) -> End:
        registration = self.registration
        if first.finished:
            with suppress(MegatronFTError):
                await self.coordinator.refresh()  # after what ranks have said of their end
            return Finished()
        if self.refusal is not None:
            raise self.refusal
        if first.status > 0 and not registration.complete.is_set():
            # Nodes answer after their earlier events, perhaps why this rank could not begin.
            await self.coordinator.refresh()
        if registration.other_layout(self.plan.decision.stripes) and not self.plan.reshaped:
            self.members.reshape()
            text = "the command has another parallel layout than the snapshots in memory"
            self._emit("reshaping", f"{text}: they are reshaped")
            return Asked(text)
        registration.check_fit()
        return self._trainer_failure(first)

    async def _until_arena_missing(self, beginning: asyncio.Task[None]) -> ArenaRemoved:
        """The failure of an arena whose file is gone, where memory serves without it.

        Trainers continue to write into what nobody else can open, and only their next start makes a
        new arena.  Where memory does not serve, or only with an old snapshot (they were paused),
        trainers hold the better state.  The decision waits for a while, as what removes files on
        one node may be about to remove them on others.
        """
        coordinator = self.coordinator
        await asyncio.wait({beginning})
        coordinator.forget_missing()  # of earlier incarnations: this one has made new arenas
        while True:
            await coordinator.arena_missing.wait()
            reached = max(coordinator.progress.values(), default=-1)
            await coordinator.settle_missing()
            serves, cycle = coordinator.fallbacks().crash, coordinator.cycle
            most = 0 if cycle is None else MOST_INTERVALS * cycle.schedule.spacing
            found = "nothing" if serves is None else f"only iteration {serves.iteration}"
            for node in self.plan.active:
                if not (text := coordinator.missing.get(node)):
                    continue
                if serves is not None and reached - serves.iteration <= most:
                    return ArenaRemoved(f"{node}: {text}", node)
                then = f"memory serves {found} without it, and no snapshot is taken before "
                then += "trainers start again: training continues"
                self._emit("damaged", f"{node}: {text}; {then}", node=node)

    async def _replicas_differ(self) -> ReplicasDiffer:
        """The failure of replicas that differ; what may have gone wrong with them is given up."""
        coordinator = self.coordinator
        await coordinator.refresh()
        on_nodes = [coordinator.standing.held.get(node, ()) for node in self.plan.active]
        held = set.intersection(*({(s, i) for s, i, _ in one} for one in on_nodes))
        known = (coordinator.standing.committed, coordinator.standing.durable)
        before, failure = coordinator.replicas.undo(held | {one[:2] for one in known if one})
        self.quarantine.give_up(before)
        return failure

    def _trainer_failure(self, first: TrainerExit) -> Failure:
        """The failure of the first trainer; its end and the end of its log are emitted."""
        rank, node, status = first.rank, first.node, first.status
        how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
        # The OOM killer of the kernel sends the same signal.
        memory = " (if by the OOM killer, see dmesg there)" if status == -signal.SIGKILL else ""
        text = f"{self.trainers.name_of(rank)} {how}"
        if status > 0 and not self.registration.complete.is_set():
            text += self._shape()
        if late := self.registration.late:
            text += f" ({late})"
        where = f"{self.trainers.name_of(rank)} on {node} {how}{memory}"
        self._emit("trainer_died", where, rank=rank, node=node, status=status)
        if status > 0:
            path = self.trainers.log_of(rank)
            self._emit("log", f"end of {path}:\n{last_lines(path)}")
        if not self.launcher.reachable(node):
            return NodeLost(text, node)
        path = self.trainers.log_of(rank)
        said = last_word(path, self.trainers.log_starts.get(path, 0)) if status > 0 else ""
        if self.launcher.is_away(said):
            return TrainerRefused(f"{text}: {said}")
        if status in RERUN_CODES:
            why = f"{text}, as Megatron does to be resumed from its checkpoint (--rerun-mode)"
            return TrainerStopped(why, status=status)
        if self._meets_again(status):
            return TrainerFailed(text, final=True, status=status)
        outside = -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        kind = TrainerStopped if outside else TrainerFailed
        return kind(text, node, status=status)

    def _meets_again(self, status: int) -> bool:
        """True if another start would end alike: no node, and nothing of the job, is the cause."""
        if status == REFUSED:
            return True
        never = not (self.state.record.shards or self.registration.hellos)
        return status in NEVER_STARTED and never

    def _on_restartable(self, event: m.NodeEvent) -> None:
        if isinstance(event.body, m.Restartable):
            self.trainers.can_restart(event.body.rank)

    def _on_late_ranks(self, text: str) -> None:
        """Emit once that ranks may train without any protection."""
        self._emit("unregistered", text)

    def _on_declined(self, event: m.NodeEvent) -> None:
        """Emit once that trainers take another start than the one that was announced."""
        body = event.body
        if not isinstance(body, m.Declined) or self.declined:
            return
        self.declined = True
        self.coordinator.standing.resumes(body.iteration)
        offered, found = self.plan.decision.iteration, body.iteration
        source = "scratch" if found < 0 else f"the framework's checkpoint of iteration {found}"
        lost = max(0, self.reached - max(0, found))
        text = f"trainers do not take the snapshot of iteration {offered}: {body.reason}; they "
        text += f"start from {source}; {lost} iterations are lost"
        self._emit("declined", text, offered=offered, iteration=found, reason=body.reason)

    def _emit(self, kind: str, text: str, **fields: Any) -> None:
        self.coordinator.observers.emit(kind, text, **fields)
