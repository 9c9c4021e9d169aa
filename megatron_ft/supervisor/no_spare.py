"""Going on with fewer nodes when one is lost and no spare is left.

No state is resharded here.  What memory could serve has been drained by then (salvage.py); it
is exported, and the training framework loads its own format into fewer data-parallel ranks.
Arenas of the old shape stay until that is on disk.

Bringing memory to disk when the job is about to stop and no trainer will.

A lost node that nobody replaces has its shards still in the parity of the others.  They are
rebuilt on nodes that are left, beside their own, and everything is drained before the job
stops; then it is exported, for frameworks that know nothing of us.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_ft.checkpoint.decide import Decision
from megatron_ft.checkpoint.drained import Drained
from megatron_ft.checkpoint.native import iteration_of, newest_checkpoint
from megatron_ft.core.errors import MegatronFTError, ProtectionError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SHRINK, RankRule
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, check_domains
from megatron_ft.supervisor.distrust import memory_goes_first, reason_against_own
from megatron_ft.supervisor.job_parts import JobParts
from megatron_ft.supervisor.placement import choose_active
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
    if parts.spec.settings.drain_dir is None:
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
    if parts.spec.settings.export_on_failure is not None and admitted.inventories:
        node = next(iter(admitted.inventories))
        await parts.drains.export_durable(node, parts.spec.settings.export_on_failure)


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
    if parts.spec.settings.drain_dir is None or not there or not shards:
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
        slot_count=parts.spec.settings.slots,
    )


NOTHING = Decision(None, -1, False, (), {})


def fewer_nodes(
    left: Sequence[str],
    before: int,
    ranks_per_node: int,
    rule: RankRule,
    domains: Domains,
    scheme: Scheme,
) -> tuple[list[str], tuple[str, ...]]:
    """As many of the nodes that are ``left`` as the job can go on with, fewer than ``before``.

    Nodes that come first are preferred.  Each has ``ranks_per_node`` ranks; stripes of
    ``scheme`` over them keep the rule of failure domains.  Empty if no number will do; the
    reasons say why each larger one does not.  Pure.
    """
    reasons: list[str] = []
    for count in range(min(len(left), before - 1), 0, -1):
        reason = rule.against(count * ranks_per_node)
        if not reason:
            chosen = choose_active(left, count, domains, scheme)
            reason = _without_stripes(chosen, domains, scheme)
            if not reason:
                return chosen, tuple(reasons)
        reasons.append(f"{count} nodes: {reason}")
    return [], tuple(reasons)


def _without_stripes(nodes: Sequence[str], domains: Domains, scheme: Scheme) -> str:
    try:
        check_domains(nodes, domains, scheme)
    except ProtectionError as error:
        return str(error)
    return ""


def describe_fewer(parts: JobParts, rule: RankRule | None) -> str:
    """With how many nodes this job could go on, in one line."""
    counts, active, spec = [], parts.members.active, parts.spec
    found = list(active)
    while rule and found:
        found, _ = fewer_nodes(
            found, len(found), spec.ranks_per_node, rule, spec.domains, spec.scheme
        )
        counts += [str(len(found))] if found else []
    if not counts:
        return f"without a spare the job cannot go on with fewer than {len(active)} nodes"
    return f"without a spare the job can go on with {' or '.join(counts)} nodes"


async def go_on_with_fewer(parts: JobParts, choice: RestoreChoice, admitted: Admitted) -> bool:
    """Whether the next incarnation has fewer nodes: all that it needs is on disk then.

    To be called after a salvage.  False, with the reason told, where that cannot be; nothing
    has changed then, and memory has what it had.
    """
    if parts.spec.settings.on_no_spare != SHRINK:
        return False
    chosen, reasons = _choose(parts, admitted)
    if chosen:
        reach("shrink.chosen")
        problem = await _exported(parts, choice, admitted)
        reasons = (problem,) if problem else ()
    if not chosen or reasons:
        text = "; ".join(reasons) or "no node is left"
        parts.observers.tell("not_shrunk", f"the job cannot go on with fewer nodes: {text}")
        return False
    reach("shrink.exported")
    before = len(parts.members.active)
    parts.members.shrink_to(chosen)
    reach("shrink.noted")
    ranks = parts.members.ranks
    text = f"going on with {len(chosen)} nodes instead of {before}, {ranks} ranks"
    parts.observers.tell("shrunk", f"{text}: {', '.join(chosen)}", nodes=chosen, ranks=ranks)
    return True


def _choose(parts: JobParts, admitted: Admitted) -> tuple[list[str], tuple[str, ...]]:
    spec, active = parts.spec, parts.members.active
    rule = parts.state.record.rank_rule
    if rule is None:
        return [], ("its ranks have not said yet with how many they could",)
    there = parts.members.usable(admitted)
    left = [*(n for n in active if n in there), *(n for n in there if n not in active)]
    return fewer_nodes(left, len(active), spec.ranks_per_node, rule, spec.domains, spec.scheme)


async def _exported(parts: JobParts, choice: RestoreChoice, admitted: Admitted) -> str:
    """Have what the job would have gone on from in the framework's format; why it is not, or "".

    A newer checkpoint that the framework itself has saved is as good.
    """
    record, directory = parts.state.record, parts.spec.settings.drain_export_dir
    assert directory is not None, "the settings were checked"
    if not record.committed:
        return ""
    memory = choice.memory(admitted, len(record.shards) or None)
    taken = (await parts.disk.look(NOTHING, record)).taken
    wanted = memory.iteration
    if taken is not None and _of_this_job(parts, taken):
        wanted = max(wanted, taken.manifest.iteration)
        # After a rewind, what has a higher number may be of what was given up: an export of that
        # is withdrawn by the next one.
        rolled_back = memory_goes_first(record.quarantine, directory)
        if _exported_iteration(directory) < wanted or rolled_back:
            parts.coordinator.durable = (taken.manifest.snapshot, taken.manifest.iteration)
            await parts.drains.export_durable(next(iter(admitted.inventories)), directory)
    unwanted = reason_against_own(record.quarantine, newest_checkpoint(directory))
    if unwanted:
        return f"what {directory} holds is not used: {unwanted}"
    if (there := _exported_iteration(directory)) < max(wanted, 0):
        holds = "no checkpoint" if there < 0 else f"iteration {there}"
        return f"{directory} should hold iteration {max(wanted, 0)} and holds {holds}"
    if memory_goes_first(record.quarantine, directory) and there > max(wanted, 0):
        return f"{directory} holds iteration {there}, maybe of what the job was rolled back from"
    return ""


def _of_this_job(parts: JobParts, drained: Drained) -> bool:
    own = drained.manifest.job == parts.state.record.job
    return own and drained.folder.parent == parts.spec.settings.drain_dir


def _exported_iteration(directory: Path) -> int:
    """That of the newest checkpoint of the framework's own, -1 if there is none."""
    newest = newest_checkpoint(directory)
    return -1 if newest is None else iteration_of(newest)
