"""Emergency drain: puts memory on disk before the job stops or continues with fewer nodes.

A lost node that nobody replaces has its shards still in the parity of the others.  They are
rebuilt on nodes that are left, beside their own, and everything is drained before the job
stops, and exported where the job has a --drain-export-dir.

With ``--on-no-spare shrink`` the job continues with fewer nodes.  No state is resharded here: the
training framework loads the export into fewer data-parallel ranks.  Arenas of the old shape
stay until that is on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_ft.checkpoint.decide import Decision, Quarantine
from megatron_ft.checkpoint.native import newest_checkpoint, newest_iteration
from megatron_ft.core.errors import MegatronFTError, ProtectionError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SHRINK, RankRule
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, check_domains
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.disk_restore import DiskRestores
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Inventories, Membership
from megatron_ft.supervisor.placement import choose_active
from megatron_ft.supervisor.quarantine_policy import memory_goes_first, reason_against_own
from megatron_ft.supervisor.recovery import Recovery, RestorePlan
from megatron_ft.supervisor.spec import JobSpec

DRAIN_SECONDS = 3600.0
"""Longest drain before the job stops; nothing else is waiting for the disk then."""

NOTHING = Decision(None, -1, False, (), {})


class EmergencyDrain:
    """Drains memory without trainers, and has the job continue with fewer nodes where it can.

    No failure of a drain is raised, so that the job ends with the reason for which it stops.
    """

    def __init__(
        self,
        spec: JobSpec,
        state: JobState,
        coordinator: Coordinator,
        members: Membership,
        drains: Drains,
        disk: DiskRestores,
        recovery: Recovery,
    ) -> None:
        self._spec, self._state = spec, state
        self._coordinator, self._members = coordinator, members
        self._drains, self._disk, self._recovery = drains, disk, recovery
        self._emit = coordinator.observers.emit

    async def without_trainers(self) -> None:
        """Trainers fail again and again: bring the last committed snapshot to disk."""
        if self._spec.settings.drain_dir is None:
            return
        try:
            admitted = await self._members.admit_all({})
        except MegatronFTError as error:
            self._emit("salvage_failed", f"memory could not be drained: {error}")
        else:
            await self.run(admitted, "trainers cannot come back")

    async def run(self, admitted: Inventories, reason: str = "no spare is left") -> None:
        """The job is about to stop: drain what memory can serve."""
        plan = self._plan(admitted)
        if plan is None:
            return
        text = f"{reason}: draining before anything else; {plan.describe()[0]}"
        self._emit("salvaging", text)
        try:
            self._state.update(incarnation=plan.incarnation, lineage=plan.lineage)
            await self._recovery.carry_out(plan, admitted)
            durable = self._coordinator.durable
            # A snapshot whose drain ended with the trainers counts as not drained.
            first = min(plan.decision.iteration, -1 if durable is None else durable[1])
            self._drains.begin(plan.places, self._state.record.shards, plan.lineage, first)
            problem = "" if await self._drains.last(DRAIN_SECONDS) else "see above"
        except MegatronFTError as error:
            problem = str(error)
        if problem:
            self._emit("salvage_failed", f"memory could not be drained: {problem}")

    async def shrink(self, admitted: Inventories) -> bool:
        """Have the job continue with fewer nodes if it can; True if it does.

        Call it after ``run``.  If True, all that the next incarnation needs is on disk.  If False,
        nodes and memory are as before; if shrinking was asked for, the reason is emitted.
        """
        if self._spec.settings.on_no_spare != SHRINK:
            return False
        chosen, reasons = self._choose(admitted)
        if chosen:
            reach("shrink.chosen")
            problem = await self._exported(admitted)
            reasons = (problem,) if problem else ()
        if not chosen or reasons:
            text = "; ".join(reasons) or "no node is left"
            self._emit("not_shrunk", f"the job cannot continue with fewer nodes: {text}")
            return False
        reach("shrink.exported")
        before = len(self._members.active)
        self._members.shrink_to(chosen)
        reach("shrink.noted")
        ranks = self._members.ranks
        text = f"continuing with {len(chosen)} nodes instead of {before}, {ranks} ranks"
        self._emit("shrunk", f"{text}: {', '.join(chosen)}", nodes=chosen, ranks=ranks)
        return True

    def _plan(self, admitted: Inventories) -> RestorePlan | None:
        """The restore on nodes that are left; None if nothing can be drained."""
        usable = self._members.usable(admitted)
        there = [node for node in self._members.active if node in usable]
        if self._spec.settings.drain_dir is None or not there or not self._state.record.shards:
            return None
        memory = self._recovery.memory(admitted)
        if memory.snapshot is None:
            return None
        return RestorePlan(
            decision=memory,
            places=self._members.places(doubled_up(self._members.active, there)),
            active=tuple(there),
            incarnation=self._coordinator.incarnation,
            lineage=self._recovery.lineage(memory),
            slot_count=self._spec.settings.slots,
        )

    def _choose(self, admitted: Inventories) -> tuple[list[str], tuple[str, ...]]:
        spec, active = self._spec, self._members.active
        rule = self._state.record.rank_rule
        if rule is None:
            return [], ("its ranks have not said yet with how many they could",)
        there = self._members.usable(admitted)
        left = [*(n for n in active if n in there), *(n for n in there if n not in active)]
        return fewer_nodes(left, len(active), spec.ranks_per_node, rule, spec.domains, spec.scheme)

    async def _exported(self, admitted: Inventories) -> str:
        """Export what the job would have resumed from; why that is not on disk, or "".

        A newer checkpoint that the framework itself has saved is as good.
        """
        record, directory = self._state.record, self._spec.settings.drain_export_dir
        assert directory is not None, "the settings were checked"
        if not record.committed:
            return ""
        wanted = self._recovery.memory(admitted).iteration
        taken = (await self._disk.look(NOTHING, record)).taken
        ours = taken is not None and taken.manifest.job == record.job
        if taken is not None and ours and taken.folder.parent == self._spec.settings.drain_dir:
            wanted = max(wanted, taken.manifest.iteration)
            # After a rewind, what has a higher number may be of what was given up: an export of
            # that is withdrawn by the next one.
            rolled_back = memory_goes_first(record.quarantine, directory)
            if newest_iteration(directory) < wanted or rolled_back:
                self._coordinator.durable = (taken.manifest.snapshot, taken.manifest.iteration)
                await self._drains.export_durable(next(iter(admitted)), directory)
        return reason_not_exported(directory, max(wanted, 0), record.quarantine)


def reason_not_exported(directory: Path, wanted: int, quarantine: Quarantine) -> str:
    """Reason why the framework would load no iteration from ``wanted`` on in a folder, or ""."""
    unwanted = reason_against_own(quarantine, newest_checkpoint(directory))
    if unwanted:
        return f"what {directory} holds is not used: {unwanted}"
    if (there := newest_iteration(directory)) < wanted:
        return f"{directory} should hold iteration {wanted}; its newest is {there}"
    if memory_goes_first(quarantine, directory) and there > wanted:
        return f"{directory} holds iteration {there}, maybe of what the job was rolled back from"
    return ""


def doubled_up(active: Sequence[str], left: Collection[str]) -> list[str]:
    """The nodes by position with those that are lost replaced by others in turn.  Pure.

    ``left`` must have one of them at least.
    """
    survivors = [node for node in active if node in left]
    lost = [node for node in active if node not in left]
    substitutes = {node: survivors[i % len(survivors)] for i, node in enumerate(lost)}
    return [substitutes.get(node, node) for node in active]


def fewer_nodes(
    left: Sequence[str],
    before: int,
    ranks_per_node: int,
    rule: RankRule,
    domains: Domains,
    scheme: Scheme,
) -> tuple[list[str], tuple[str, ...]]:
    """As many of the nodes that are ``left`` as the job can continue with, fewer than ``before``.

    Nodes that come first are preferred.  Each has ``ranks_per_node`` ranks; stripes of
    ``scheme`` over them keep the rule of failure domains.  Empty if no number will do; the
    reasons say why each larger one does not.  Pure.
    """
    reasons: list[str] = []
    for count in range(min(len(left), before - 1), 0, -1):
        reason = rule.against(count * ranks_per_node)
        chosen = choose_active(left, count, domains, scheme)
        try:
            check_domains(chosen, domains, scheme)
        except ProtectionError as error:
            reason = reason or str(error)
        if not reason:
            return chosen, tuple(reasons)
        reasons.append(f"{count} nodes: {reason}")
    return [], tuple(reasons)
