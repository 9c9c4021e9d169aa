"""What a new incarnation starts from: memory, a drained checkpoint, or what the framework finds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from megatron_ft.checkpoint.decide import Decision, decide
from megatron_ft.checkpoint.drained import Choice
from megatron_ft.checkpoint.native import LATEST, TRACKER, newest_checkpoint
from megatron_ft.core.errors import UnrecoverableError
from megatron_ft.core.identity import Ancestor, extend
from megatron_ft.core.process_tools import in_thread
from megatron_ft.supervisor.changed import check_memory
from megatron_ft.supervisor.disk_restore import lineage_before
from megatron_ft.supervisor.distrust import reason_against_own
from megatron_ft.supervisor.foresight import LOOK_SECONDS, foresee
from megatron_ft.supervisor.job_parts import JobParts
from megatron_ft.supervisor.job_state import command_digest
from megatron_ft.supervisor.restore import (
    Admitted,
    DiskSource,
    Restore,
    describe_restore,
    restore,
)
from megatron_ft.trainer.start_choice import StartDecision


class RestoreChoice:
    """Decides for one job, writes the decision into its notes and tells the observers."""

    def __init__(self, parts: JobParts) -> None:
        self._job = parts

    async def choose(self, admitted: Admitted) -> Restore:
        """The plan of an incarnation whose nodes were admitted and whose lost ones are replaced.

        UnrecoverableError when work would be lost and nobody allowed that; ConfigError when
        memory was laid out by other settings than those of this run.
        """
        job = self._job
        memory = self.memory(admitted, len(job.state.record.shards) or None)
        check_memory(job.spec, job.state.record, memory)
        job.state.update(
            incarnation=job.coordinator.incarnation,
            active=tuple(job.members.active),
            command_digest=command_digest(job.spec.command),
        )
        choice = await job.disk.look(memory, job.state.record)
        decision, source, lineage = self._settle(memory, choice)
        job.state.update(lineage=lineage, scheme=str(job.spec.scheme))
        plan = Restore(
            decision=decision,
            places=job.members.places(),
            active=tuple(job.members.active),
            incarnation=job.coordinator.incarnation,
            lineage=lineage,
            slot_count=job.spec.settings.slots,
            disk=source,
        )
        start = await self._foreseen(plan)
        if start is None or start.from_memory:
            self._tell(plan, memory, choice)
            return plan
        text = f"starting from disk: {start.reason}; iteration {plan.decision.iteration} is kept"
        job.observers.tell("from_disk", text)
        return replace(plan, framework_loads=True)

    async def _foreseen(self, plan: Restore) -> StartDecision | None:
        """What trainers will do with the snapshot; None if only they can know."""
        if plan.decision.snapshot is None:
            return None
        offered, command = plan.decision.iteration, self._job.spec.command
        rewound = await self._job.distrust.memory_first()
        try:
            return await in_thread(lambda: foresee(command, offered, rewound), LOOK_SECONDS)
        except (asyncio.TimeoutError, OSError, ValueError):
            return None

    def memory(self, admitted: Admitted, count: int | None) -> Decision:
        """What memory can serve of a job of ``count`` shards (None: not known)."""
        return decide(
            self._job.members.owned(admitted),
            shard_count=count,
            corrupt=self._job.notes.damaged,
            quarantine=self._job.distrust.quarantine,
            lineage=self._job.state.record.lineage,
        )

    def lineage(self, decision: Decision) -> tuple[Ancestor, ...]:
        """The lineage of an incarnation that starts from this decision."""
        arenas = [holding.arena for holding in decision.holdings.values()]
        newest = max(arenas, key=lambda arena: arena.incarnation, default=None)
        older = () if newest is None else newest.lineage
        return extend(older, self._job.coordinator.incarnation, decision.snapshot)

    def _settle(
        self, memory: Decision, choice: Choice
    ) -> tuple[Decision, DiskSource | None, tuple[Ancestor, ...]]:
        """What is restored, what of it from disk, and the lineage of this incarnation."""
        job, taken = self._job, choice.taken
        if taken is None:
            if memory.snapshot is None:
                self._accept_loss(memory, choice)
            return memory, None, self.lineage(memory)
        decision, source = job.disk.decision(taken, memory, job.members.active, job.notes.damaged)
        older = lineage_before(taken, job.state.record)
        job.state.update(shards=taken.seats)
        job.coordinator.durable = (taken.manifest.snapshot, decision.iteration)
        return decision, source, extend(older, job.coordinator.incarnation, decision.snapshot)

    def _accept_loss(self, decision: Decision, choice: Choice) -> None:
        """Neither memory nor what was drained can serve.  Go on otherwise if that is allowed."""
        job = self._job
        if job.state.record.committed:
            self._explain_loss("; ".join([decision.explanation, *choice.reasons]))
        job.coordinator.committed = job.coordinator.protected = None
        job.state.update(committed=False, shards={})

    def _explain_loss(self, reason: str) -> None:
        job = self._job
        checkpoint = newest_checkpoint(job.spec.checkpoint_dir)
        unwanted = reason_against_own(job.distrust.quarantine, checkpoint)
        if unwanted:
            # Not from scratch either: what the folder names is what the framework would load.
            raise UnrecoverableError(
                f"no snapshot can be served: {reason}. {checkpoint} cannot either: {unwanted}. "
                f"Name what is to be loaded, that one or an older one, in {TRACKER} (DeepSpeed: "
                f"{LATEST}) of its folder anew"
            )
        if checkpoint is not None:
            # Without shards the ranks are others than those that memory was of (shrink.py).
            known = job.state.record.shards
            why = f"memory lost ({reason})" if known else "another number of ranks"
            job.observers.tell("from_disk", f"{why}; starting from {checkpoint}")
        elif job.spec.from_scratch:
            job.observers.tell("from_scratch", f"memory lost ({reason}); starting from scratch")
        else:
            where = job.spec.checkpoint_dir or "no --checkpoint-dir was given"
            raise UnrecoverableError(
                f"no snapshot can be served: {reason}. There is no complete checkpoint on disk "
                f"either ({where}). To start again from nothing, add --from-scratch"
            )

    def _tell(self, plan: Restore, memory: Decision, choice: Choice) -> None:
        if plan.decision.snapshot is None:
            return
        text, source = describe_restore(plan)
        reached = self._job.reached
        lost = max(0, reached - plan.decision.iteration)
        if reached >= 0:
            text += f"; {lost} iterations are lost"
        if plan.disk is not None:
            reasons = [
                f"memory: {memory.explanation}" if memory.explanation else "",
                *choice.reasons,
            ]
            text += "".join(f"; {reason}" for reason in reasons if reason)
        self._job.observers.tell(
            "restoring",
            text,
            iteration=plan.decision.iteration,
            source=source,
            lost=list(plan.lost()),
            iterations_lost=lost if reached >= 0 else None,
        )


async def carry_out(parts: JobParts, plan: Restore, admitted: tuple[str, ...]) -> None:
    """Bring what the plan restores into the arenas of its nodes, with a world if it needs one."""
    work = restore(
        parts.coordinator,
        plan,
        admitted,
        lambda: parts.world.start(plan.active),
        lambda disk: parts.disk.load(disk, plan),
    )
    await parts.members.while_all_answer(work)
