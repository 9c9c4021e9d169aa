"""One incarnation of a job: restore, train, and watch until something ends."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from megatron_ft.core.environment import RESTORE
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import SHRINK, RankRule
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.budget import Failure
from megatron_ft.supervisor.changed import check_shard
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.failure import NODE_LOST, trainer_failure
from megatron_ft.supervisor.job_parts import JobParts
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.no_spare import describe_fewer, go_on_with_fewer, salvage
from megatron_ft.supervisor.plan import stripe_orders
from megatron_ft.supervisor.processes import TrainerExit
from megatron_ft.supervisor.registration import (
    Roll,
    make_arenas,
    refuse_trainers,
    settle_stripes,
    wait_for_all,
)
from megatron_ft.supervisor.restore import Admitted, Restore
from megatron_ft.supervisor.restore_choice import RestoreChoice, carry_out

log = logging.getLogger(__name__)

ALL_FAIL_SECONDS = 5.0
"""A command that cannot start at all fails on all ranks within this time."""


class Incarnation:
    """Runs one incarnation; whoever runs it ends its trainers and its world afterwards."""

    def __init__(self, parts: JobParts) -> None:
        self._job = parts
        self._roll: Roll
        self._plan: Restore
        self._declined = False

    async def run(self) -> Failure | None:
        """None when training has finished; errors of nodes and of memory are raised."""
        job = self._job
        begun = await self._begin()
        if begun is None:
            return Failure("fewer nodes train", asked=True)
        plan, admitted = begun
        self._plan = plan
        await carry_out(job, plan, admitted)
        if plan.framework_loads:
            job.coordinator.resumed_from = -1
        ranks = job.members.ranks
        await job.distrust.begin(plan.decision, plan.lineage, ranks)
        restored = plan.decision.snapshot is not None
        known = frozenset(job.state.record.shards) if restored else frozenset[str]()
        roll = self._roll = Roll(ranks, job.spec.domains, known=known)
        job.coordinator.listeners += [roll.hear, self._note_declined]
        try:
            if job.spec.scheme.parity_members and not job.world.wanted:
                job.world.start(plan.active)
            job.watch.begin_incarnation(ranks)
            source = "disk" if plan.framework_loads else job.distrust.source(plan.decision)
            job.trainers.start(plan.active, plan.incarnation, {RESTORE: source})
            job.observers.tell("trainers_started", f"{ranks} trainers started")
            return await self._watch(asyncio.create_task(self._begin_snapshots(roll, plan)))
        finally:
            job.registered |= bool(roll.hellos)
            for listener in (roll.hear, self._note_declined):
                job.coordinator.listeners.remove(listener)

    def _note_declined(self, event: m.Event) -> None:
        """Tell once that trainers take another start than the one that was announced."""
        body, job = event.body, self._job
        if not isinstance(body, m.Declined) or self._declined:
            return
        self._declined, job.coordinator.resumed_from = True, body.iteration
        if self._plan.framework_loads:
            return
        offered, found = self._plan.decision.iteration, body.iteration
        source = "scratch" if found < 0 else f"the framework's checkpoint of iteration {found}"
        text = f"trainers do not take the snapshot of iteration {offered}: {body.reason}; "
        text += f"they start from {source}"
        if job.reached >= 0:
            text += f"; {max(0, job.reached - max(0, found))} iterations are lost"
        job.observers.tell("declined", text, offered=offered, iteration=found, reason=body.reason)

    async def _begin(self) -> tuple[Restore, tuple[str, ...]] | None:
        """A new incarnation on all nodes, lost ones replaced, and what it starts from.

        None if lost ones were not replaced and the next incarnation has fewer nodes.
        """
        job, choice = self._job, RestoreChoice(self._job)
        admitted = await job.members.admit_all()
        job.distrust.admitted()
        self._set_suspect_aside(choice, admitted)
        job.replaced |= set(job.members.lost(admitted))
        try:
            job.members.replace_lost(admitted)
        except NoSpareError:
            await salvage(job, choice, admitted)
            if await go_on_with_fewer(job, choice, admitted):
                return None
            raise
        return await choice.choose(admitted), tuple(admitted.inventories)

    def _set_suspect_aside(self, choice: RestoreChoice, admitted: Admitted) -> None:
        """Have a spare take the place of the node that a repeated failure implicates.

        Not where memory could serve less without that node.
        """
        job = self._job
        node, count = job.budget.suspect, len(job.state.record.shards) or None
        spares, lost = job.members.free_spares(), job.members.lost(admitted)
        if node not in job.members.active or len(spares) <= len(lost):
            return
        others = {name: one for name, one in admitted.inventories.items() if name != node}
        without = choice.memory(Admitted(others, (*admitted.lost, node)), count)
        if without.iteration >= choice.memory(admitted, count).iteration:
            job.members.suspect(node, job.budget.failures[-1].text)

    async def _begin_snapshots(self, roll: Roll, plan: Restore) -> None:
        job = self._job
        sizes = job.spec.sizes
        await wait_for_all(roll, job.spec.settings.register_timeout_seconds)
        if roll.stranger:
            check_shard(job.spec.name, roll.known, roll.stranger)
        rule = await self._rank_rule(roll)
        stored = plan.decision.stripes if plan.decision.snapshot is not None else ()
        stripes = settle_stripes(roll, stored, job.spec.scheme, sizes)
        places = roll.places()
        await make_arenas(job.coordinator, stripes, places, plan.lineage, job.spec.settings.slots)
        job.state.update(shards=roll.seats(), rank_rule=rule)
        orders = stripe_orders(stripes, places, plan.active)
        first = max(0, plan.decision.iteration)
        schedule = job.pacing.begin(roll.interval, first)
        job.observers.tell("training", "training")
        job.coordinator.start_snapshots(SnapshotCycle(plan.incarnation, places, orders, schedule))
        job.drains.begin(places, roll.seats(), plan.lineage, first)
        # Now, when the nodes that train have done with imports of their own.
        job.warm_spares.begin(n for n in job.launcher.nodes() if n not in plan.active)

    async def _rank_rule(self, roll: Roll) -> RankRule | None:
        """With how many ranks the command could go on; the trainers hear an error, too."""
        job = self._job
        shrinks = job.spec.settings.on_no_spare == SHRINK
        try:
            rule = roll.rank_rule(needed=shrinks)
        except ConfigError as error:
            await refuse_trainers(job.coordinator, set(roll.places().values()), error)
            raise
        if shrinks:
            job.observers.tell("shrinkable", describe_fewer(job, rule))
        return rule

    async def _watch(self, beginning: asyncio.Task[None]) -> Failure | None:
        """Until this incarnation ends.  SMPs and encoders that die alone are replaced meanwhile."""
        job = self._job
        trainers = asyncio.create_task(job.trainers.ended())
        silent = asyncio.create_task(job.coordinator.silent.wait())
        rewind = asyncio.create_task(job.coordinator.rewind_asked.wait())
        hang = asyncio.create_task(job.watch.until_hang())
        try:
            while True:
                smp = asyncio.create_task(job.members.smps.ended())
                waits: set[asyncio.Task[Any]] = {trainers, silent, smp, rewind, hang}
                waits |= set() if beginning.done() else {beginning}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                dead = smp.result() if smp.done() else []
                smp.cancel()
                if trainers.done():
                    return await self._trainers_ended(trainers.result())
                if rewind.done():
                    return Failure(job.distrust.rewind(), asked=True)
                if hang.done():
                    found = hang.result()
                    return Failure(found.signature, "a hang", found.node, training=True)
                if silent.done():
                    failure = self._silent()
                    if failure is not None:
                        return failure
                    silent = asyncio.create_task(job.coordinator.silent.wait())
                if beginning.done():
                    beginning.result()
                if reason := await job.members.replace_smps(dead):
                    return Failure(reason, "a snapshot daemon was not replaced", dead[0])
        finally:
            for task in (trainers, silent, rewind, hang, beginning):
                task.cancel()

    def _silent(self) -> Failure | None:
        job = self._job
        job.coordinator.silent.clear()
        failure, job.coordinator.failure = job.coordinator.failure, None
        if failure is not None:
            log.error("the coordinator failed", exc_info=failure)
            job.observers.tell("coordinator_failed", f"the coordinator failed: {failure!r}")
            text = f"the coordinator failed: {failure!r}"
            return Failure(text, f"the coordinator failed with {type(failure).__name__}")
        job.coordinator.require_lead()
        lost = job.members.silent()
        if not lost or job.members.without(lost):
            return None
        job.watch.clock.detected(job.spec.timing.node_timeout)
        job.observers.tell("silent", f"no heartbeat from {', '.join(lost)}")
        return Failure(f"no heartbeat from {', '.join(lost)}", NODE_LOST, lost[0])

    async def _trainers_ended(self, first: TrainerExit) -> Failure | None:
        job = self._job
        if first.finished:
            return None
        if first.status > 0 and not self._roll.complete.is_set():
            # Nodes answer behind what they have told, perhaps why this rank could not begin.
            await job.coordinator.refresh()
        if self._roll.stranger:
            check_shard(job.spec.name, self._roll.known, self._roll.stranger)
        job.notes.raise_if_unfit()
        failure = trainer_failure(first, job.trainers, job.launcher, job.coordinator, job.notes.oom)
        seen = job.registered or self._roll.hellos or job.state.record.shards
        if failure.training and not seen and await job.trainers.all_failed(ALL_FAIL_SECONDS):
            text = (
                f"{failure.text}, as all ranks did before one of them had registered: see its log"
            )
            return replace(failure, text=text, final=True)
        return failure
