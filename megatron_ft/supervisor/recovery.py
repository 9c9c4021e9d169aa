"""Recovery of a job: the steps from "something died" to "trainers may start".

``Recovery.run`` is the recipe: admit all nodes into a new incarnation, replace those that are
lost, decide what is served, bring it back, commit it, and let trainers in.  The decision on what
memory serves is pure (checkpoint/decide.py).

Each step can be interrupted: nothing that a later attempt needs is given up before the
restored snapshot is complete and committed everywhere again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from megatron_ft.checkpoint.decide import Decision, decide
from megatron_ft.checkpoint.drained import Choice
from megatron_ft.checkpoint.native import LATEST, TRACKER, newest_checkpoint
from megatron_ft.core.errors import ConfigError, UnrecoverableError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, SnapshotId, extend
from megatron_ft.core.scheme import Scheme
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.admission import Inventories, LivingRanks, kept_ranks
from megatron_ft.supervisor.disk_restore import DiskRestores, DiskSource, lineage_before
from megatron_ft.supervisor.events import RestoringEvent
from megatron_ft.supervisor.health import Health, Vote
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.orders import shards_by_node
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy, reason_against_own
from megatron_ft.supervisor.restore import RestorePlan, make_targets, rebuild
from megatron_ft.supervisor.slot_choice import USUAL, SlotChoice, choose_slots, present_slots
from megatron_ft.supervisor.spec import JobSpec

NOTHING = Decision(None, -1, False, (), {})


class Recovery:
    """Recovers one job, once for each of its incarnations."""

    def __init__(
        self,
        job: JobContext,
        disk: DiskRestores,
        quarantine: QuarantinePolicy,
        health: Health,
    ) -> None:
        self._spec, self._state = job.spec, job.state
        self._job, self._members, self._group = job, job.members, job.encoder_group
        self._fleet, self._standing = job.fleet, job.standing
        self._disk, self._quarantine, self._health = disk, quarantine, health

    async def run(self, reached: int, survivors: LivingRanks) -> RestorePlan:
        """Recover the job into a new incarnation; the plan that was carried out.

        ``reached`` is the last iteration before the failure, -1 if none is known; ``survivors``
        are trainers that live.  NoSpareError
        when too few nodes are left.  UnrecoverableError when work would be lost and nobody
        allowed that; ConfigError when memory was laid out by other settings than those of this
        run.  After RebuildError, LoadError, NoRoomError or ControlPlaneError another attempt
        may succeed.
        """
        vote = asyncio.create_task(self._health.vote())
        try:
            plan = await self._recover(reached, survivors, vote)
        finally:
            vote.cancel()
        await self._quarantine.begin(plan.decision, plan.lineage, self._members.seats.ranks)
        return plan

    async def _recover(
        self, reached: int, survivors: LivingRanks, vote: asyncio.Task[dict[str, Vote]]
    ) -> RestorePlan:
        """Recover beside the vote on nodes, again if it goes against one that got ranks."""
        voted = False
        while True:
            admitted = await self._members.admit_all(survivors)
            self._quarantine.admitted()
            serves = partial(self._serves_without, admitted)
            if not voted and (vote.done() or not self._state.record.shards):
                self._health.settle(await vote, admitted, serves)
                voted = True
            self._members.replace_lost(admitted)
            plan = await self._choose(admitted, reached)
            plan = await self.carry_out(plan, admitted)
            # Before trainers start: commands may need the GPUs for themselves.
            if voted or not self._health.settle(await vote, admitted, serves):
                return plan
            voted = True

    def _serves_without(self, admitted: Inventories, nodes: Collection[str]) -> bool:
        """True if memory serves the same snapshot without what these nodes hold."""
        left = {node: held for node, held in admitted.items() if node not in nodes}
        (with_all, _), (without, _) = self._from_memory(admitted), self._from_memory(left)
        return with_all.snapshot == without.snapshot

    def memory(self, admitted: Inventories) -> Decision:
        """The newest snapshot that memory of the admitted nodes can serve, and what it lacks."""
        return decide(
            self._members.owned(admitted),
            shard_count=len(self._state.record.shards) or None,
            corrupt=self._standing.damage.lost,
            quarantine=self._quarantine.quarantine,
            lineage=self._state.record.lineage,
        )

    def memory_of_sources(self, admitted: Inventories) -> Decision:
        """As ``memory``, of the shards of an older layout."""
        return decide(
            self._members.owned_sources(admitted),
            shard_count=len(self._state.record.sources),
            corrupt=self._standing.damage.lost,
            quarantine=self._quarantine.quarantine,
            lineage=self._state.record.lineage,
        )

    def lineage(self, decision: Decision) -> tuple[Ancestor, ...]:
        """The lineage of an incarnation that starts from this decision on memory."""
        arenas = [holding.arena for holding in decision.holdings.values()]
        newest = max(arenas, key=lambda arena: arena.incarnation, default=None)
        older = () if newest is None else newest.lineage
        return extend(older, self._fleet.incarnation, decision.snapshot)

    async def carry_out(self, plan: RestorePlan, admitted: Inventories) -> RestorePlan:
        """Bring what the plan restores into the arenas of its nodes, commit it, let trainers in.

        The plan with the slots of its arenas, which are chosen if none were there.

        RebuildError when some shard could not be rebuilt, LoadError when one could not be loaded,
        NoRoomError when a node has no room for one, ControlPlaneError when a node fails.
        """
        return await self._members.while_all_answer(self._carry_out(plan, tuple(admitted)))

    async def _choose(self, admitted: Inventories, reached: int) -> RestorePlan:
        """Decide between memory, a drained checkpoint and the framework's own; note the decision.

        The job's nodes are those that train from now on.
        """
        spec, fleet, members = self._spec, self._fleet, self._members
        memory, sources = self._from_memory(admitted)
        self._state.update(
            incarnation=fleet.incarnation,
            active=members.seats.active,
            nodes=spec.nodes,
        )
        hung = bool(fleet.hanging)
        choice = await self._disk.look(memory, self._state.record, hung=hung)
        if sources == "return" and choice.taken is not None:
            memory, sources = NOTHING, "drop"
        returns = sources == "return" and members.fit_again(admitted, memory.stripes)
        reshaped = sources == "return" and not returns
        if reshaped:
            self._state.update(sources=members.source_places(admitted), shards={})
        elif sources == "drop":
            self._state.update(sources={}, source_seats={})
        decision, source, lineage = self._settle(memory, choice)
        if source is not None and len(self._state.record.shards) != members.seats.ranks:
            members.reshape()
            reshaped, sources = True, "return"
        self._state.update(lineage=lineage, scheme=str(members.seats.scheme))
        places = members.source_homes() if returns else members.places()
        plan = RestorePlan(
            decision=decision,
            places=dict(self._state.record.sources) if reshaped else places,
            active=members.seats.active,
            incarnation=fleet.incarnation,
            lineage=lineage,
            slots=present_slots(decision),
            disk=source,
            kept=() if reshaped else kept_ranks(admitted),
            sources=sources,
            reshaped=reshaped,
            reached=reached,
        )
        self._emit_restoring(plan, memory, choice)
        return plan

    def _from_memory(self, admitted: Inventories) -> tuple[Decision, m.Sources]:
        """The snapshot that memory can serve, and the fate of shards of an older layout.

        Shards of the present layout go first: they are newer.
        """
        memory, record = self.memory(admitted), self._state.record
        if memory.snapshot is None and record.sources:
            older = self.memory_of_sources(admitted)
            return (memory, "drop") if older.snapshot is None else (older, "return")
        check_memory(self._spec, self._members.seats.scheme, record.scheme, memory)
        return memory, "hold" if record.sources else "drop"

    def _settle(
        self, memory: Decision, choice: Choice
    ) -> tuple[Decision, DiskSource | None, tuple[Ancestor, ...]]:
        """The decision, the checkpoint of which shards are loaded, and the new lineage."""
        taken, standing = choice.taken, self._standing
        if choice.kept is not None:
            # It may be of an earlier supervisor.
            manifest = choice.kept.manifest
            standing.drains(manifest.snapshot, manifest.iteration)
        if taken is not None:
            damaged = self._standing.damage.lost
            members = self._members
            decision, source = self._disk.decision(
                taken, memory, members.active, members.seats.scheme, damaged
            )
            older = lineage_before(taken, self._state.record)
            self._state.update(shards=taken.seats)
            standing.drains(taken.manifest.snapshot, decision.iteration)
            return decision, source, extend(older, self._fleet.incarnation, decision.snapshot)
        if memory.snapshot is None:
            if self._state.record.committed:
                self._accept_loss("; ".join([memory.explanation, *choice.reasons]))
            standing.loses_memory()
            self._state.update(committed=False, shards={})
        return memory, None, self.lineage(memory)

    def _accept_loss(self, reason: str) -> None:
        """Continue without what was committed, if the framework or the user allows that.

        UnrecoverableError if not: neither memory nor what was drained can serve.
        """
        spec, emit = self._spec, self._fleet.observers.emit
        checkpoint = newest_checkpoint(spec.checkpoint_dir)
        unwanted = reason_against_own(self._quarantine.quarantine, checkpoint)
        if unwanted:
            # Not from scratch either: what the folder names is what the framework would load.
            raise UnrecoverableError(
                f"no snapshot can be served: {reason}. {checkpoint} cannot either: {unwanted}. "
                f"Name anew what is to be loaded in {TRACKER} (DeepSpeed: {LATEST}) of its folder"
            )
        if checkpoint is not None:
            # A job that has shrunk has no shards in its notes any more.
            known = self._state.record.shards
            why = f"memory lost ({reason})" if known else "another number of ranks"
            emit("from_disk", f"{why}; starting from {checkpoint}")
        elif spec.from_scratch:
            emit("from_scratch", f"memory lost ({reason}); starting from scratch")
        else:
            where = spec.checkpoint_dir or "no --checkpoint-dir was given"
            raise UnrecoverableError(
                f"no snapshot can be served: {reason}. There is no complete checkpoint on disk "
                f"either ({where}). To start again from nothing, add --from-scratch"
            )

    def _emit_restoring(self, plan: RestorePlan, memory: Decision, choice: Choice) -> None:
        if plan.decision.snapshot is None:
            return
        text, source = plan.describe()
        lost = max(0, plan.reached - plan.decision.iteration) if plan.reached >= 0 else None
        if lost is not None:
            text += f"; {lost} iterations are lost"
        if plan.disk is not None:
            reasons = [f"memory: {memory.explanation}"] if memory.explanation else []
            text += "".join(f"; {reason}" for reason in [*reasons, *choice.reasons])
        event = RestoringEvent(
            iteration=plan.decision.iteration,
            source=source,
            lost=plan.lost(),
            iterations_lost=lost,
        )
        self._fleet.observers.emit(event, text)

    async def _carry_out(self, plan: RestorePlan, admitted: Sequence[str]) -> RestorePlan:
        fleet, standing, snapshot = self._fleet, self._standing, plan.decision.snapshot
        standing.restores(snapshot)
        await fleet.ask_all({node: plan.adoption(node) for node in admitted})
        if plan.sources == "return" and not plan.reshaped:
            self._members.returned()
        reach("recovery.adopted")
        if snapshot is not None:
            if not plan.slots.count:
                plan = replace(plan, slots=await self._choose_slots(plan))
            await self._bring_back(plan, snapshot)
            level = "protected" if plan.decision.protected else "local"
            commit = m.Commit(plan.incarnation, snapshot, level)
            reach("recovery.committing")
            await fleet.ask_all({node: commit for node in plan.nodes})
            standing.commits(snapshot, plan.decision.iteration, level)
        ready = m.RestoreReady(
            plan.incarnation, snapshot, plan.origins(), plan.reshaped, plan.decision.iteration
        )
        await fleet.ask_all({node: ready for node in plan.active})
        standing.resumes(plan.decision.iteration if snapshot is not None else -1)
        if snapshot is not None:
            reach("recovery.ready")
        return plan

    async def _choose_slots(self, plan: RestorePlan) -> SlotChoice:
        """The slots of arenas that a checkpoint is loaded into; those of sources are only read."""
        if plan.reshaped:
            return SlotChoice(USUAL)
        stripes, spares = plan.decision.stripes, self._members.free_spares()
        return await choose_slots(self._fleet, self._spec, stripes, plan.places, spares)

    async def _bring_back(self, plan: RestorePlan, snapshot: SnapshotId) -> None:
        """Rebuild lost shards from parity, and load those that come from disk."""
        fleet, disk = self._fleet, plan.disk
        if plan.decision.lost:
            await make_targets(fleet, plan, plan.lost())
            self._group.start(plan.nodes)
            await self._job.encoders.ready()
            await rebuild(self._job, plan, snapshot)
        if disk is not None:
            await make_targets(fleet, plan, disk.shards)
            iteration, shards = plan.decision.iteration, shards_by_node(disk.shards, plan.places)
            await fleet.ask_all(
                {
                    node: m.Load(plan.incarnation, snapshot, iteration, tuple(found))
                    for node, found in shards.items()
                }
            )
            await self._disk.load(disk, snapshot, plan.places, plan.incarnation)


def check_memory(spec: JobSpec, wanted: Scheme, scheme: str, memory: Decision) -> None:
    """ConfigError if memory serves a snapshot whose arenas were made by other settings.

    ``wanted`` is the scheme of stripes that are made now, ``scheme`` the one in the job's notes,
    "" if there is none.
    """
    if memory.snapshot is None:
        return
    slots, protect = present_slots(memory).count, str(wanted)
    for flag, kept, asked in (
        ("protect", scheme or protect, protect),
        ("slots", slots, spec.settings.fixed_slots or slots),
    ):
        if kept != asked:
            raise ConfigError(
                f"job {spec.name!r} keeps its snapshots in memory with --{flag} {kept}; you asked "
                f"for {asked}. Run it again with --{flag} {kept}; or write the snapshot to disk, "
                f"`megatron-ft drain --job {spec.name} --to DIR`, and start a job of another name "
                "from there, with --restore-from DIR"
            )
