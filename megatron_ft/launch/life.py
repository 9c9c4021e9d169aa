"""One life of a job, an incarnation: restore, train, and watch until something ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from megatron_ft.coordinator.cycle import SnapshotCycle
from megatron_ft.coordinator.plan import stripe_orders
from megatron_ft.coordinator.recovery import Restore
from megatron_ft.coordinator.registration import Roll, make_arenas, settle_stripes, wait_for_all
from megatron_ft.environment import RESTORE
from megatron_ft.launch.failure import Failure, trainer_failure
from megatron_ft.launch.fleet import TrainerExit
from megatron_ft.launch.job_parts import JobParts
from megatron_ft.launch.membership import NoSpareError
from megatron_ft.launch.restore_choice import RestoreChoice, carry_out
from megatron_ft.launch.salvage import salvage

log = logging.getLogger(__name__)


class Life:
    """Runs one incarnation; whoever runs it ends its trainers and its world afterwards."""

    def __init__(self, parts: JobParts) -> None:
        self._job = parts

    async def run(self) -> Failure | None:
        """None when training has finished; errors of nodes and of memory are raised."""
        job = self._job
        plan, admitted = await self._begin()
        await carry_out(job, plan, admitted)
        job.distrust.begin(plan.decision, plan.lineage)
        roll = Roll(job.spec.world_size, job.spec.domains)
        job.coordinator.listeners.append(roll.hear)
        try:
            if job.spec.scheme.parity_members and not job.world.wanted:
                job.world.start(plan.active)
            job.watch.begin_life()
            job.trainers.start(
                plan.active, plan.incarnation, {RESTORE: job.distrust.source(plan.decision)}
            )
            job.observers.tell("trainers_started", f"{job.spec.world_size} trainers started")
            return await self._watch(asyncio.create_task(self._begin_snapshots(roll, plan)))
        finally:
            job.coordinator.listeners.remove(roll.hear)

    async def _begin(self) -> tuple[Restore, tuple[str, ...]]:
        """A new incarnation on all nodes, lost ones replaced, and what it starts from."""
        job, choice = self._job, RestoreChoice(self._job)
        admitted = await job.members.admit_all()
        job.distrust.admitted()
        try:
            job.members.replace_lost(admitted)
        except NoSpareError:
            await salvage(job, choice, admitted)
            raise
        return await choice.choose(admitted), tuple(admitted.inventories)

    async def _begin_snapshots(self, roll: Roll, plan: Restore) -> None:
        job, sizes = self._job, self._job.spec.sizes
        await wait_for_all(roll, job.spec.register_timeout)
        stored = plan.decision.stripes if plan.decision.snapshot is not None else ()
        stripes = settle_stripes(roll, stored, job.spec.scheme, sizes)
        places = roll.places()
        await make_arenas(job.coordinator, stripes, places, plan.lineage, sizes)
        job.state.update(shards=roll.seats())
        orders = stripe_orders(stripes, places, plan.active, sizes)
        first = max(0, plan.decision.iteration)
        interval = roll.interval
        cycle = SnapshotCycle(
            plan.incarnation, places, orders, interval or 1, first, fixed=interval > 0
        )
        job.pacing.begin(cycle)
        job.observers.tell("training", "training")
        job.coordinator.start_snapshots(cycle)
        job.drains.begin(places, roll.seats(), plan.lineage, first)
        # Now, when the nodes that train have done with imports of their own.
        job.warm_spares.begin(n for n in job.launcher.nodes() if n not in plan.active)

    async def _watch(self, beginning: asyncio.Task[None]) -> Failure | None:
        """Until this life ends.  SMPs and encoders that die alone are replaced meanwhile."""
        job = self._job
        trainers = asyncio.create_task(job.trainers.ended())
        silent = asyncio.create_task(job.coordinator.silent.wait())
        rewind = asyncio.create_task(job.coordinator.rewind_asked.wait())
        hang = asyncio.create_task(job.watch.until_hang())
        try:
            while True:
                smp = asyncio.create_task(job.members.smps.first_exit())
                waits: set[asyncio.Task[Any]] = {trainers, silent, smp, rewind, hang}
                waits |= set() if beginning.done() else {beginning}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                dead = smp.result() if smp.done() else ""
                smp.cancel()
                if trainers.done():
                    return self._trainers_ended(trainers.result())
                if rewind.done():
                    return Failure(job.distrust.rewind(), asked=True)
                if hang.done():
                    return Failure(hang.result().signature)
                if silent.done():
                    failure = self._silent()
                    if failure is not None:
                        return failure
                    silent = asyncio.create_task(job.coordinator.silent.wait())
                if beginning.done():
                    beginning.result()
                reason = await job.members.replace_smp(dead) if dead else ""
                if reason:
                    return Failure(reason)
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
            return Failure(f"the coordinator failed: {failure!r}")
        job.coordinator.require_lead()
        lost = job.coordinator.silent_nodes(list(job.coordinator.links))
        if not lost or job.members.without(lost):
            return None
        job.watch.clock.detected(job.spec.timing.node_timeout)
        job.observers.tell("silent", f"no heartbeat from {', '.join(lost)}")
        return Failure(f"no heartbeat from {', '.join(lost)}")

    def _trainers_ended(self, first: TrainerExit) -> Failure | None:
        job = self._job
        if first.finished:
            return None
        job.notes.raise_if_unfit()
        return trainer_failure(first, job.trainers, job.launcher, job.coordinator)
