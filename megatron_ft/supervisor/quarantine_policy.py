"""Quarantine of a job: what its recoveries must not restore, and the rival checkpoints on disk.

It holds damaged shards, snapshots from which training fails soon after a restore, and what the
user has asked to rewind.  Since training frameworks load checkpoints of their own, it also says
when memory goes before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megatron_ft.checkpoint.decide import Decision, Quarantine
from megatron_ft.checkpoint.native import iteration_of, naming, newest_iteration
from megatron_ft.core.errors import ControlPlaneError, StaleIncarnationError
from megatron_ft.core.identity import Ancestor, on_lineage
from megatron_ft.core.process_tools import in_thread
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.ends import Asked
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.snapshots import SnapshotPump

DISK_TIMEOUT_SECONDS = 10.0
"""Longest that a recovery waits for the folder of the framework's own checkpoints."""


class OwnCheckpoint(NamedTuple):
    """The framework's newest checkpoint: its iteration, -1 for none, and how it is named."""

    iteration: int
    named: str


class QuarantinePolicy:
    """The quarantine in the job's notes, so that a later supervisor knows it, too.

    ``near`` is the number of iterations after a restore within which a failure counts.  In
    ``directory`` are the framework's own checkpoints, if that is known.
    """

    def __init__(
        self, state: JobState, pump: SnapshotPump, near: int, directory: Path | None = None
    ) -> None:
        self._state, self._pump = state, pump
        self._fleet, self._standing = pump.fleet, pump.standing
        self._ranks, self._near, self._directory = 0, near, directory
        self._start: Decision | None = None
        self._over_own = False
        self._restored: set[str] = set()
        self._rewind_before, self._rewind_asked = 0, asyncio.Event()
        self._fleet.listen(self._on_event)
        self._fleet.listen_answers(self._on_answer)

    @property
    def quarantine(self) -> Quarantine:
        return self._state.record.quarantine

    def admitted(self) -> None:
        """Drop the events of the last incarnation: all nodes are in a new one."""
        self._fleet.forget_progress()
        self._rewind_asked.clear()
        self._restored.clear()

    async def begin(self, decision: Decision, lineage: tuple[Ancestor, ...], ranks: int) -> None:
        """Record that an incarnation of ``ranks`` starts from a decision.

        Every arena has its ``lineage`` by then.
        """
        self._start, self._ranks = decision, ranks
        self._state.update(quarantine=await self._begun_from(decision))
        standing = self._standing
        if standing.durable and not on_lineage(standing.durable.snapshot, lineage):
            # On disk there is only what was given up.
            standing.gives_up_checkpoint()

    def source(self, decision: Decision) -> str:
        """The word by which trainers know where their state is to come from."""
        if decision.snapshot is None:
            return "disk"
        return "rewound" if self._over_own else "memory"

    async def _begun_from(self, decision: Decision) -> Quarantine:
        """The quarantine with what of the framework's own this incarnation gives up.

        That includes what it passes over, for training will come to that iteration once more and
        save it in the same place: cut off in that, it is of two incarnations.
        """
        quarantine, own = self.quarantine, None
        if quarantine.over_disk:
            own = await self._own()
        self._over_own = quarantine.goes_before(None if own is None else own.named)
        if own is None:
            return quarantine.settled()
        wanted = [] if quarantine.before is None else [quarantine.before]
        if self._over_own and decision.snapshot is not None:
            wanted.append(decision.iteration + 1)
        if wanted and own.iteration >= min(wanted):
            quarantine = quarantine.giving_up(own.named)
        return quarantine.settled(own.named)

    async def training_failed(self) -> bool:
        """Hold a failure against the snapshot of the start if that is near; True if it is out now.

        A failure before all ranks had loaded the snapshot says nothing about it.
        """
        if self._start is None or self._start.snapshot is None:
            return False
        # Nodes answer after their earlier events: who has loaded is known then.
        await self._fleet.refresh()
        if len(self._restored) < self._ranks:
            return False
        snapshot, iteration = self._start.snapshot, self._start.iteration
        reached = max(self._fleet.progress.values(), default=-1)
        gained, before = max(0, reached - iteration), self.quarantine
        after = before.after_failure(snapshot, gained, self._near)
        if after.rejected != before.rejected:
            own = await self._own()
            after = after.giving_up(own.named if own and own.iteration > iteration else "")
        if after != before:
            self._remember(after)
        if after.rejected == before.rejected:
            return False
        self._fleet.observers.emit(
            "quarantined",
            f"training failed again {gained} iterations after snapshot {snapshot} (iteration "
            f"{iteration}): it is not used a third time",
            iteration=iteration,
            snapshot=str(snapshot),
        )
        return True

    def rebuild_failed(self, corrupt: str) -> None:
        """A rebuild of the snapshot being restored found a shard (or none: "") corrupt."""
        standing = self._standing
        if corrupt and standing.restoring is not None:
            standing.damage.lose(corrupt, standing.restoring)

    async def until_rewind(self) -> Asked:
        await self._rewind_asked.wait()
        return Asked(self.rewind())

    def rewind(self) -> str:
        """Carry out the user's request; the reason why this incarnation ends, for people."""
        before = self._rewind_before
        self.give_up(before)
        text = f"rewinding to before iteration {before}"
        self._fleet.observers.emit("rewind", text, before=before)
        return text

    def give_up(self, before: int) -> None:
        """Restore nothing of iteration ``before`` or later, nor what the framework saved of it."""
        self._remember(self.quarantine.rewound(before))

    async def give_up_unequal(self, nodes: Collection[str]) -> None:
        """Give up what may have gone wrong with replicas that differ; ``nodes`` train."""
        await self._fleet.refresh()
        standing = self._standing
        held = set.intersection(*({one[:2] for one in standing.held.get(n, ())} for n in nodes))
        known = (standing.committed, standing.durable)
        self.give_up(self._pump.replicas.undo(held | {one[:2] for one in known if one}))

    async def newest_saved(self) -> int:
        """The newest iteration that the framework has saved itself; -1 for none, or if unknown."""
        own = await self._own()
        return -1 if own is None else own.iteration

    async def _own(self) -> OwnCheckpoint | None:
        """The newest that the framework has saved itself, None where that is not known."""
        directory = self._directory
        if directory is None:
            return None
        try:
            return await in_thread(
                lambda: OwnCheckpoint(newest_iteration(directory), naming(directory)),
                DISK_TIMEOUT_SECONDS,
            )
        except (asyncio.TimeoutError, OSError):
            return None

    def _on_answer(self, answer: m.LeaseAnswer, before: object) -> None:
        if answer.rewind is not None:
            self._rewind_before = answer.rewind
            self._rewind_asked.set()

    def _on_event(self, event: m.NodeEvent) -> None:
        body = event.body
        if isinstance(body, m.Restored):
            self._restored.add(body.shard_id)
        elif isinstance(body, m.CorruptShard):
            self._standing.damage.lose(body.shard_id, body.snapshot)
            text = f"{body.blocks} blocks of {body.shard_id} fail their digests; the shard counts "
            self._fleet.observers.emit("corrupt", text + "as lost")
        elif isinstance(body, m.Rebuilt):
            self._standing.damage.mend(body.shard_id, body.snapshot)

    def _remember(self, quarantine: Quarantine) -> None:
        """Put a quarantine in force; if its note fails, until this supervisor ends."""
        try:
            self._state.update(quarantine=quarantine)
        except StaleIncarnationError:
            raise
        except ControlPlaneError as error:
            self._state.keep(quarantine=quarantine)
            self._fleet.observers.emit("notes_unwritten", str(error))


def reason_against_own(quarantine: Quarantine, checkpoint: Path | None) -> str:
    """Reason why the framework's own checkpoint must not be loaded, or nothing."""
    if checkpoint is None:
        return ""
    if quarantine.own and naming(checkpoint.parent) == quarantine.own:
        return "it is of what the job was rolled back from"
    return quarantine.reason_against_iteration(iteration_of(checkpoint))


def memory_goes_first(quarantine: Quarantine, directory: Path) -> bool:
    """True if memory goes before a newer checkpoint of the framework's own in ``directory``."""
    return quarantine.goes_before(naming(directory))
