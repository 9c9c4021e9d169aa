"""One incarnation of a job: start trainers, register them, watch until something ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.environment import RESTORE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.identity import SHRINK, RankRule
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.ends import End, Finished, ReplicasDiffer, first_end
from megatron_ft.supervisor.evacuation import Evacuations
from megatron_ft.supervisor.events import TrainingEvent
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.orders import create_requests, stripe_orders
from megatron_ft.supervisor.processes import TrainerExit
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.renewal import ArenaRenewal, until_arena_missing
from megatron_ft.supervisor.restore import (
    RestorePlan,
    make_arenas,
    make_sources,
    reshape,
    return_sources,
)
from megatron_ft.supervisor.schedule import Pacing
from megatron_ft.supervisor.slot_choice import USUAL, SlotChoice, choose_slots
from megatron_ft.supervisor.trainer_ends import judge_exit
from megatron_ft.supervisor.watch import JobWatch

log = logging.getLogger(__name__)


@dataclass
class Incarnation:
    """Runs trainers once from what a recovery has restored; the caller ends them afterwards."""

    job: JobContext
    plan: RestorePlan
    quarantine: QuarantinePolicy
    pacing: Pacing
    drains: Drains
    watch: JobWatch
    evacuations: Evacuations
    registration: Registration = field(init=False)
    renewal: ArenaRenewal = field(init=False)
    declined: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.registration = Registration(self.job.members.seats.ranks, self.job.spec.domains)
        self.renewal = ArenaRenewal(self.job, self.plan, self.registration, self.drains)

    async def run(self) -> End:
        """Train until something ends it; errors of nodes and of memory are raised."""
        job, plan, registration = self.job, self.plan, self.registration
        listeners = (registration.on_event, job.trainers.on_event, self.renewal.on_event)
        with job.fleet.listening(*listeners, self._on_declined):
            if (self._encodes() or plan.reshaped) and not job.encoder_group.wanted:
                job.encoder_group.start(plan.nodes)
            _, source = plan.describe()
            self.watch.begin_incarnation(job.members.seats.ranks, plan.decided, plan.behind, source)
            await self._start_trainers()
            # Of several that have found something at once, the first one counts.
            end = await first_end(
                job.pump.replicas.until_differ(),
                job.trainers.ended(),
                self.quarantine.until_rewind(),
                self.evacuations.until_due(),
                self._begin_snapshots(),
                self.renewal.serve(),
                self.watch.until_hang(),
                job.members.until_silence(),
                job.members.until_smp_lost(),
            )
            if isinstance(end, TrainerExit):
                end = await judge_exit(job, plan, registration, end)
            if isinstance(end, ReplicasDiffer):
                await self.quarantine.give_up_unequal(plan.active)
        if not isinstance(end, Finished) and end.idle:
            self.watch.clock.detected(end.idle)
        return end

    async def _start_trainers(self) -> None:
        """Let survivors train again, and start the other ranks."""
        plan, job = self.plan, self.job
        extra = {RESTORE: self.quarantine.source(plan.decision)}
        kept = job.trainers.in_place(plan.active, plan.kept)
        await job.trainers.kill_all(but=kept)
        requests = job.trainers.start(plan.active, plan.incarnation, extra, kept)
        await job.fleet.ask_all(requests)
        text = f"{job.members.seats.ranks - len(kept)} trainers started"
        text += job.spec.shape_note(len(plan.active))
        text += f", {len(kept)} restart in process" if kept else ""
        job.emit("trainers_started", text, in_process=sorted(kept))

    async def _begin_snapshots(self) -> End:
        """Await all ranks, make arenas, let trainers begin, and permit snapshots; then watch the
        files of the arenas."""
        job, plan, registration = self.job, self.plan, self.registration
        await registration.wait(job.spec.settings.register_timeout_seconds, self._on_late_ranks)
        self.watch.clock.registered(registration.starts())
        for why, ranks in registration.cold().items():
            job.emit("cold_start", f"ranks {sorted(ranks)} started cold: {why}", ranks=ranks)
        places = registration.places()
        nodes = sorted(set(places.values()))
        try:
            rule = self._rank_rule(places)
            stripes, slots = await self._make_arenas(places)
        except MegatronFTError as error:
            # Noted first: trainers may have ended before all nodes have answered.
            registration.refuse(error)
            refusal = m.ArenasReady(plan.incarnation, error)
            await job.fleet.ask_all(dict.fromkeys(nodes, refusal))
            if plan.reshaped:
                await return_sources(job.fleet, plan)
            raise
        await job.fleet.ask_all(dict.fromkeys(nodes, m.ArenasReady(plan.incarnation)))
        state = job.state
        state.update(shards=registration.placements(), rank_rule=rule)
        if plan.nodes != plan.active:
            self._narrow_world()
        self._permit(places, stripes, slots)
        await self._share_imports(nodes[0])
        return await until_arena_missing(job, plan.active)

    def _rank_rule(self, places: dict[str, str]) -> RankRule | None:
        """Numbers of ranks that the command could continue with; ConfigError as Registration's."""
        plan, spec = self.plan, self.job.spec
        other = plan.reshaped and plan.places.keys() != places.keys()
        shrinks = spec.settings.on_no_spare == SHRINK
        rule = self.registration.rank_rule(needed=shrinks or other)
        # With arguments of --shapes, that of the command without them.
        shaped = spec.arguments_for(len(plan.active))
        return self.job.state.record.rank_rule if shaped else rule

    async def _make_arenas(
        self, places: dict[str, str]
    ) -> tuple[tuple[StripeState, ...], SlotChoice]:
        """Make or check the arenas of all shards, filled where the snapshot is reshaped."""
        job, plan = self.job, self.plan
        restored = plan.decision.snapshot is not None and not plan.reshaped
        stored = plan.decision.stripes if restored else ()
        stripes = self.registration.stripes(stored, job.members.seats.scheme, job.spec.block_bytes)
        if plan.reshaped:
            await make_sources(job.fleet, plan)
        slots = await self._choose_slots(stripes, places)
        requests = create_requests(stripes, plan.incarnation, plan.lineage, slots.count)
        await make_arenas(job.fleet, requests, places)
        if plan.reshaped and not self.declined:
            await reshape(job, plan, places)
        return stripes, slots

    def _permit(
        self, places: dict[str, str], stripes: tuple[StripeState, ...], slots: SlotChoice
    ) -> None:
        """Have snapshots taken of the shards in these arenas, and drained."""
        plan, pump = self.plan, self.job.pump
        first = max(0, plan.decision.iteration)
        schedule = self.pacing.begin(self.registration.interval, first)
        self.job.emit(TrainingEvent(iteration=first), "training")
        orders = stripe_orders(stripes, places, plan.active)
        if slow := self.job.encoder_group.processes.starter.slow(stripes, places):
            self.job.emit("transport", slow)
        self.renewal.begin(stripes, (slots.count, self.job.spec.settings.fixed_slots or USUAL))
        judge = partial(pump.replicas.judge, places)
        cycle = SnapshotCycle(plan.incarnation, places, orders, schedule, judge)
        pump.start(cycle)
        self.drains.begin(places, self.registration.placements(), plan.lineage, first)
        self.drains.warn_of_slots(slots)

    async def _choose_slots(
        self, stripes: tuple[StripeState, ...], places: dict[str, str]
    ) -> SlotChoice:
        """The slots of this incarnation's arenas: those of arenas that are there, or chosen."""
        if self.plan.slots.count and not self.plan.reshaped:
            return self.plan.slots
        spares = self.job.members.free_spares()
        return await choose_slots(self.job.fleet, self.job.spec, stripes, places, spares)

    def _encodes(self) -> bool:
        return bool(self.job.members.seats.scheme.parity_members)

    def _narrow_world(self) -> None:
        """Replace an encoder world that a reshape needed on more nodes than train."""
        if self._encodes():
            self.job.encoder_group.start(self.plan.active)
        else:
            self.job.encoder_group.stop()

    async def _share_imports(self, node: str) -> None:
        """Have the hosts of spares import what the first trainer of a node has imported.

        A spare that does not hear of it starts its ranks later by these imports.
        """
        spares = self.job.members.free_spares()
        if self.job.trainers.why_cold or not spares:
            return
        request = m.ImportsRequest(self.plan.incarnation)
        try:
            noted = (await self.job.fleet.ask_all({node: request}))[node]
            await self.job.fleet.ask_all(dict.fromkeys(spares, noted))
        except MegatronFTError as error:
            log.warning("trainer hosts of spares do not know what to import: %s", error)

    def _on_late_ranks(self, text: str) -> None:
        """Emit once that ranks may train without any protection."""
        self.job.emit("unregistered", text)

    def _on_declined(self, event: m.NodeEvent) -> None:
        """Emit once that trainers take another start than the one that was announced."""
        body = event.body
        if not isinstance(body, m.Declined) or self.declined:
            return
        self.declined = True
        self.job.standing.resumes(body.iteration)
        offered, found = self.plan.decision.iteration, body.iteration
        source = "scratch" if found < 0 else f"the framework's checkpoint of iteration {found}"
        lost = max(0, self.plan.reached - max(0, found))
        text = f"trainers do not take the snapshot of iteration {offered}: {body.reason}; they "
        text += f"start from {source}; {lost} iterations are lost"
        self.job.emit("declined", text, offered=offered, iteration=found, reason=body.reason)
