"""Emergency drain: puts memory on disk before the job stops.

A lost node that nobody replaces has its shards still in the parity of the others.  They are
rebuilt on nodes that are left, beside their own, and everything is drained before the job
stops, and exported where the job has a --drain-export-dir.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.core.errors import ControlPlaneError, MegatronFTError
from megatron_ft.supervisor.admission import Inventories
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.recovery import Recovery
from megatron_ft.supervisor.restore import RestorePlan
from megatron_ft.supervisor.slot_choice import present_slots

DRAIN_SECONDS = 3600.0
"""Longest drain before the job stops; nothing else is waiting for the disk then."""

TRIES = 3


class EmergencyDrain:
    """Drains memory without trainers.

    No failure of a drain is raised, so that the job ends with the reason for which it stops.
    """

    def __init__(self, job: JobContext, drains: Drains, recovery: Recovery) -> None:
        self._spec, self._state = job.spec, job.state
        self._fleet, self._standing, self._members = job.fleet, job.standing, job.members
        self._drains, self._recovery = drains, recovery
        self._emit = job.emit

    async def without_trainers(self, reason: str = "trainers cannot come back") -> None:
        """No trainer runs any more: bring the last committed snapshot to disk."""
        if self._spec.settings.drain_dir is None:
            return
        try:
            admitted = await self._members.admit_all({})
        except MegatronFTError as error:
            self._emit("salvage_failed", f"memory could not be drained: {error}")
        else:
            await self.run(admitted, reason)

    async def run(self, admitted: Inventories, reason: str = "no spare is left") -> None:
        """The job is about to stop: drain what memory can serve.

        If an SMP dies meanwhile, a new one adopts its arenas, and the drain begins again.
        """
        problem = ""
        try:
            for _ in range(TRIES):
                if (plan := self._plan(admitted)) is None:
                    break
                text = f"{reason}: draining before anything else; {plan.describe()[0]}"
                self._emit("salvaging", text)
                try:
                    problem = await self._drain(plan, admitted)
                    break
                except ControlPlaneError as error:
                    reason = problem = str(error)
                    admitted = await self._members.admit_all({})
        except MegatronFTError as error:
            problem = str(error)
        if problem:
            self._emit("salvage_failed", f"memory could not be drained: {problem}")

    async def _drain(self, plan: RestorePlan, admitted: Inventories) -> str:
        """Carry the plan out and drain; what went wrong with the drain, or nothing."""
        self._state.update(incarnation=plan.incarnation, lineage=plan.lineage)
        await self._recovery.carry_out(plan, admitted)
        durable = self._standing.durable
        # A snapshot whose drain ended with the trainers counts as not drained.
        first = min(plan.decision.iteration, -1 if durable is None else durable.iteration)
        self._drains.begin(plan.places, self._state.record.shards, plan.lineage, first)
        try:
            drained = await self._members.while_all_answer(self._drains.last(DRAIN_SECONDS))
        except MegatronFTError:
            await self._drains.abandon()
            raise
        return "" if drained else "see above"

    def _plan(self, admitted: Inventories) -> RestorePlan | None:
        """The restore on nodes that are left; None if nothing can be drained."""
        seats = self._members.seats
        usable = seats.usable(admitted)
        there = [node for node in seats.active if node in usable]
        if self._spec.settings.drain_dir is None or not there or not self._state.record.shards:
            return None
        memory = self._recovery.memory(admitted)
        if memory.snapshot is None:
            return None
        return RestorePlan(
            decision=memory,
            places=self._members.places(doubled_up(seats.active, there)),
            active=tuple(there),
            incarnation=self._fleet.incarnation,
            lineage=self._recovery.lineage(memory),
            slots=present_slots(memory),
        )


def doubled_up(active: Sequence[str], left: Collection[str]) -> list[str]:
    """The nodes by position with those that are lost replaced by others in turn.  Pure.

    ``left`` must have one of them at least.
    """
    survivors = [node for node in active if node in left]
    lost = [node for node in active if node not in left]
    substitutes = {node: survivors[i % len(survivors)] for i, node in enumerate(lost)}
    return [substitutes.get(node, node) for node in active]
