"""What a supervisor remembers against snapshots: failures soon after a restore, and rewinds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

from megatron_ft.checkpoint.decide import Decision, Quarantine
from megatron_ft.checkpoint.native import iteration_of, naming, newest_checkpoint
from megatron_ft.core.identity import Ancestor, on_lineage
from megatron_ft.core.process_tools import in_thread
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.job_state import JobState

LOOK_TIMEOUT_SECONDS = 10.0
"""Longest that a recovery waits for the folder of the framework's own checkpoints."""


class Own(NamedTuple):
    """The framework's newest checkpoint: its iteration, -1 for none, and how it is named."""

    iteration: int
    named: str


class Distrust:
    """The quarantine in the job's notes, so that a later supervisor knows it, too.

    ``near`` is the number of iterations after a restore within which a failure counts.  In
    ``directory`` are the framework's own checkpoints, if that is known.
    """

    def __init__(
        self, state: JobState, coordinator: Coordinator, near: int, directory: Path | None = None
    ) -> None:
        self._state, self._coordinator = state, coordinator
        self._ranks, self._near, self._directory = 0, near, directory
        self._start: Decision | None = None
        self._over_own = False
        self._restored: set[str] = set()
        coordinator.listeners.append(self._note_restored)

    @property
    def quarantine(self) -> Quarantine:
        """As it stands in the notes."""
        return self._state.record.quarantine

    def admitted(self) -> None:
        """All nodes are in a new incarnation: what was heard of the last one is over."""
        self._coordinator.rewind_asked.clear()
        self._coordinator.progress.clear()
        self._restored.clear()

    async def begin(self, decision: Decision, lineage: tuple[Ancestor, ...], ranks: int) -> None:
        """An incarnation of so many ranks starts from a decision, and every arena's lineage says
        so."""
        self._start, self._ranks = decision, ranks
        self._state.update(quarantine=await self._begun_from(decision))
        durable = self._coordinator.durable
        if durable is not None and not on_lineage(durable[0], lineage):
            # On disk there is only what was given up.
            self._coordinator.durable = None

    async def memory_first(self) -> bool:
        """Whether memory goes before the framework's own checkpoint, even if that is newer."""
        own = await self._own() if self.quarantine.over_disk else None
        return self.quarantine.goes_before(None if own is None else own.named)

    def source(self, decision: Decision) -> str:
        """The word by which trainers know where their state is to come from."""
        if decision.snapshot is None:
            return "disk"
        return "rewound" if self._over_own else "memory"

    async def _begun_from(self, decision: Decision) -> Quarantine:
        """What of the framework's own this incarnation gives up.

        Also what it passes over, for training will come to that iteration once more and save it
        in the same place: cut off in that, it is of two incarnations.
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
        """Hold it against the snapshot of the start if that is near; whether it is out now.

        A failure before all ranks had loaded the snapshot says nothing about it.
        """
        if self._start is None or self._start.snapshot is None:
            return False
        # Nodes answer behind what they have told: who has loaded is known then.
        await self._coordinator.refresh()
        if len(self._restored) < self._ranks:
            return False
        snapshot, iteration = self._start.snapshot, self._start.iteration
        reached = max(self._coordinator.progress.values(), default=-1)
        gained, before = max(0, reached - iteration), self.quarantine
        after = before.after_failure(snapshot, gained, self._near)
        if after.rejected != before.rejected:
            own = await self._own()
            after = after.giving_up(own.named if own and own.iteration > iteration else "")
        if after != before:
            self._remember(after)
        if after.rejected == before.rejected:
            return False
        self._coordinator.observers.tell(
            "quarantined",
            f"training failed again {gained} iterations after snapshot {snapshot} (iteration "
            f"{iteration}): it is not used a third time",
            iteration=iteration,
            snapshot=str(snapshot),
        )
        return True

    async def _own(self) -> Own | None:
        """The newest that the framework has saved itself, None where that is not known."""
        directory = self._directory
        if directory is None:
            return None

        def look() -> Own:
            newest = newest_checkpoint(directory)
            return Own(-1 if newest is None else iteration_of(newest), naming(directory))

        try:
            return await in_thread(look, LOOK_TIMEOUT_SECONDS)
        except (asyncio.TimeoutError, OSError):
            return None

    def _note_restored(self, event: m.Event) -> None:
        if isinstance(event.body, m.Restored):
            self._restored.add(event.body.shard_id)

    def _remember(self, quarantine: Quarantine) -> None:
        """It holds from now on; an outage of the notes ends no job that runs from memory."""
        if reason := self._state.remember(quarantine=quarantine):
            self._coordinator.observers.tell("notes_unwritten", reason)

    def rewind(self) -> str:
        """The user has asked for it: what this incarnation ends with, for people."""
        before = self._coordinator.rewind_before
        self._remember(self.quarantine.rewound(before))
        text = f"rewinding to before iteration {before}"
        self._coordinator.observers.tell("rewind", text, before=before)
        return text


def reason_against_own(quarantine: Quarantine, checkpoint: Path | None) -> str:
    """Why the framework's own checkpoint must not be loaded, or nothing."""
    if checkpoint is None:
        return ""
    if quarantine.own and naming(checkpoint.parent) == quarantine.own:
        return "it is of what the job was rolled back from"
    return quarantine.reason_against_iteration(iteration_of(checkpoint))


def memory_goes_first(quarantine: Quarantine, directory: Path) -> bool:
    """Whether memory goes before a newer checkpoint of the framework's own in ``directory``."""
    return quarantine.goes_before(naming(directory))
