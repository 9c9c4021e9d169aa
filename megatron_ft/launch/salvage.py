"""Bringing memory to disk when a node is lost and nobody takes its place.

What the lost node held is still in the parity of the others.  It is rebuilt on nodes that
are left, beside their own shards, and everything is drained before the job stops.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.coordinator.recovery import Admitted, Restore, describe_restore
from megatron_ft.errors import MegatronFTError
from megatron_ft.launch.job_parts import JobParts
from megatron_ft.launch.restore_choice import RestoreChoice, carry_out

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


async def salvage(parts: JobParts, choice: RestoreChoice, admitted: Admitted) -> None:
    """The job is about to stop for want of a spare: drain what memory can serve before."""
    plan = _plan(parts, choice, admitted)
    if plan is None:
        return
    parts.state.update(incarnation=plan.incarnation, lineage=plan.lineage)
    parts.observers.tell(
        "salvaging",
        f"no spare is left: draining before the job stops; {describe_restore(plan)[0]}",
    )
    try:
        await carry_out(parts, plan, tuple(admitted.inventories))
        shards = parts.state.record.shards
        parts.drains.begin(plan.places, shards, plan.lineage, plan.decision.iteration)
        reason = "" if await parts.drains.last(SALVAGE_SECONDS) else "see above"
    except MegatronFTError as error:
        reason = str(error)
    if reason:
        parts.observers.tell("salvage_failed", f"memory could not be drained: {reason}")


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
        sizes=parts.spec.sizes,
    )
