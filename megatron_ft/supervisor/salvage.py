"""Bringing memory to disk when the job is about to stop and no trainer will.

A lost node that nobody replaces has its shards still in the parity of the others.  They are
rebuilt on nodes that are left, beside their own, and everything is drained before the job
stops; then it is exported, for frameworks that know nothing of us.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.supervisor.job_parts import JobParts
from megatron_ft.supervisor.restore import Admitted, Restore, describe_restore
from megatron_ft.supervisor.restore_choice import RestoreChoice, carry_out

SALVAGE_SECONDS = 3600.0
"""Longest drain before the job stops; nothing else is waiting for the disk then."""


def doubled_up(active: Sequence[str], left: Collection[str]) -> list[str]:
    """The nodes by position with those that are lost replaced by others in turn.  Pure.

    ``left`` must have one of them at least.
    """
    survivors = [node for node in active if node in left]
    lost = [node for node in active if node not in left]
    substitutes = {node: survivors[i % len(survivors)] for i, node in enumerate(lost)}
    return [substitutes.get(node, node) for node in active]


async def salvage_without_trainers(parts: JobParts) -> None:
    """Trainers fail again and again: bring the last committed snapshot to disk without them.

    No failure here is raised, so that the job ends with the reason for which it stops.
    """
    if parts.spec.drain_dir is None:
        return
    try:
        admitted = await parts.members.admit_all()
    except MegatronFTError as error:
        parts.observers.tell("salvage_failed", f"memory could not be drained: {error}")
    else:
        await salvage(parts, RestoreChoice(parts), admitted, "trainers cannot come back")


async def salvage(
    parts: JobParts,
    choice: RestoreChoice,
    admitted: Admitted,
    reason: str = "no spare is left",
) -> None:
    """The job is about to stop: drain what memory can serve before, and export what is on disk."""
    await _drain(parts, choice, admitted, reason)
    if parts.spec.export_on_failure is not None and admitted.inventories:
        node = next(iter(admitted.inventories))
        await parts.drains.export_durable(node, parts.spec.export_on_failure)


async def _drain(parts: JobParts, choice: RestoreChoice, admitted: Admitted, reason: str) -> None:
    plan = _plan(parts, choice, admitted)
    if plan is None:
        return
    parts.observers.tell(
        "salvaging",
        f"{reason}: draining before anything else; {describe_restore(plan)[0]}",
    )
    try:
        parts.state.update(incarnation=plan.incarnation, lineage=plan.lineage)
        await carry_out(parts, plan, tuple(admitted.inventories))
        shards = parts.state.record.shards
        durable = parts.coordinator.durable
        # What a drain had begun that ended with the trainers counts as not drained.
        first = min(plan.decision.iteration, -1 if durable is None else durable[1])
        parts.drains.begin(plan.places, shards, plan.lineage, first)
        problem = "" if await parts.drains.last(SALVAGE_SECONDS) else "see above"
    except MegatronFTError as error:
        problem = str(error)
    if problem:
        parts.observers.tell("salvage_failed", f"memory could not be drained: {problem}")


def _plan(parts: JobParts, choice: RestoreChoice, admitted: Admitted) -> Restore | None:
    there = [node for node in parts.members.active if node in parts.members.usable(admitted)]
    shards = parts.state.record.shards
    if parts.spec.drain_dir is None or not there or not shards:
        return None
    memory = choice.memory(admitted, len(shards))
    if memory.snapshot is None:
        return None
    active = doubled_up(parts.members.active, there)
    return Restore(
        decision=memory,
        places=parts.members.places(active),
        active=tuple(there),
        incarnation=parts.coordinator.incarnation,
        lineage=choice.lineage(memory),
        slot_count=parts.spec.sizes.slot_count,
    )
