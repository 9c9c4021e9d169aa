"""Drained checkpoints as a source of a recovery, where memory cannot serve or is older.

Every recovery looks for one.  It is loaded into the arenas of its shards' nodes, and trainers
restore from there as from memory.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ft.checkpoint.decide import Decision, Quarantine, StripeState
from megatron_ft.checkpoint.drained import Choice, DiskCriteria, Drained, choose, find, of_one_job
from megatron_ft.checkpoint.load import EXIT_DAMAGED, LoadPlan
from megatron_ft.checkpoint.native import iteration_of, newest_checkpoint
from megatron_ft.core.errors import ConfigError, DrainError, MegatronFTError
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.core.process_tools import in_thread
from megatron_ft.core.scheme import NO_PARITY, Scheme
from megatron_ft.erasure.stripes import RankPlace, domain_of
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.supervisor.job_state import JobRecord, homes_of
from megatron_ft.supervisor.orders import shards_by_node
from megatron_ft.supervisor.quarantine_policy import memory_goes_first, reason_against_own
from megatron_ft.supervisor.registration import new_stripes
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.steps import StepFailedError, run_step

LOOK_TIMEOUT_SECONDS = 120.0
HUNG_LOOK_SECONDS = 5.0
"""Longest look at a disk on which a drain hangs, if memory serves a snapshot."""


class LoadError(MegatronFTError):
    """A checkpoint could not be loaded into memory; another recovery follows."""


@dataclass(frozen=True)
class DiskSource:
    """A drained checkpoint that a recovery takes, and the shards that come from it.

    ``fresh`` says that no arena stays, since memory can serve nothing.
    """

    folder: Path
    shards: tuple[str, ...]
    fresh: bool


class DiskRestores:
    """Finds, chooses and loads drained checkpoints for one job over all its incarnations."""

    def __init__(self, spec: JobSpec, launcher: Launcher) -> None:
        self._spec = spec
        self._launcher = launcher
        self._refused: set[Path] = set()
        self._restore_from = spec.restore_from

    def forget_restore_from(self) -> None:
        """Do without what the user gave to start from."""
        self._restore_from = None

    def highest_incarnation(self, job: uuid.UUID) -> int:
        """The last incarnation in ``restore_from``: incarnations of this job must be numbered
        above it.

        ConfigError if there is no whole checkpoint.
        """
        if self._restore_from is None:
            return 0
        found = of_one_job(self._restore_from, job)
        return max(a.incarnation for one in found for a in one.manifest.lineage)

    async def look(self, memory: Decision, record: JobRecord, *, hung: bool = False) -> Choice:
        """The drained checkpoint that beats what memory serves and the framework's own, if any.

        A disk that fails or hangs costs its checkpoints, with a reason, and never the recovery.
        ``hung`` says that a drain hangs there.
        """
        seconds = HUNG_LOOK_SECONDS if hung and memory.snapshot else LOOK_TIMEOUT_SECONDS
        try:
            return await in_thread(lambda: self._look(memory, record), seconds)
        except asyncio.TimeoutError:
            reason = f"the disk did not answer within {seconds:.0f} s"
        except OSError as error:
            reason = f"the disk cannot be read: {error}"
        return Choice(None, (reason,))

    def _look(self, memory: Decision, record: JobRecord) -> Choice:
        own, reasons, quarantine = None, tuple[str, ...](), record.quarantine
        kept: Drained | None = None
        try:
            own = None if memory.snapshot else self._own(quarantine)
        except OSError as error:
            # Another disk than that of the drained ones, perhaps.
            reasons = (f"{self._spec.checkpoint_dir} cannot be read: {error.strerror}",)
        wanted = DiskCriteria(
            shard_count=(len(record.active) or self._spec.nodes) * self._spec.ranks_per_node,
            lineage=record.lineage,
            newer_than=memory.snapshot,
            own_iteration=-1 if own is None else iteration_of(own),
            refused=frozenset(self._refused),
            reason_against=quarantine.reason_against,
        )
        if self._spec.settings.drain_dir is not None:
            found, problems = find(self._spec.settings.drain_dir, record.job)
            choice = choose(found, wanted)
            reasons = (*choice.reasons, *problems, *reasons)
            if choice.taken is not None:
                return Choice(choice.taken, reasons)
            kept = choose(found, replace(wanted, newer_than=None)).taken
        if self._restore_from is None or memory.snapshot is not None:
            return Choice(None, reasons, kept)
        return self._asked_for(self._restore_from, wanted, record, reasons)

    def _own(self, quarantine: Quarantine) -> Path | None:
        """The framework's newest checkpoint, None if memory and drained ones go before it."""
        directory = self._spec.checkpoint_dir
        own = newest_checkpoint(directory)
        if directory is None or memory_goes_first(quarantine, directory):
            return None
        return None if reason_against_own(quarantine, own) else own

    def _asked_for(
        self, folder: Path, wanted: DiskCriteria, record: JobRecord, reasons: tuple[str, ...]
    ) -> Choice:
        """A checkpoint from ``restore_from``; the framework's own counts once the job has run."""
        try:
            found = of_one_job(folder, record.job)
        except ConfigError as error:
            return Choice(None, (*reasons, str(error)))
        if found[0].manifest.job != record.job:
            wanted = replace(wanted, lineage=())
        if not record.committed:
            wanted = replace(wanted, own_iteration=-1)
        choice = choose(found, wanted)
        return Choice(choice.taken, (*reasons, *choice.reasons))

    def decision(
        self,
        drained: Drained,
        memory: Decision,
        active: Sequence[str],
        scheme: Scheme,
        corrupt: Collection[tuple[str, SnapshotId]],
    ) -> tuple[Decision, DiskSource]:
        """The decision on a chosen checkpoint, and the shards that must be loaded.

        ``scheme`` is that of arenas that are made anew.

        Arenas that can serve something stay, and shards in them that are the checkpoint's
        are not loaded; otherwise all is made anew.  Shards of another number of ranks, which
        are to be reshaped, get no parity.
        """
        manifest = drained.manifest
        fresh = memory.snapshot is None
        decision = Decision(
            manifest.snapshot,
            manifest.iteration,
            False,
            self._stripes(drained, active, scheme) if fresh else memory.stripes,
            {} if fresh else memory.holdings,
        )
        held = {s for s in manifest.shards if _holds(decision, s, drained)}
        shards = manifest.shards.keys() - held | {s for s, at in corrupt if at == manifest.snapshot}
        return decision, DiskSource(drained.folder, tuple(sorted(shards)), fresh)

    def _stripes(
        self, drained: Drained, active: Sequence[str], scheme: Scheme
    ) -> tuple[StripeState, ...]:
        """Stripes for arenas that do not exist yet, over the nodes that train now."""
        slot_bytes, seats = drained.slot_bytes, drained.seats
        homes = homes_of(seats, active)
        if len(seats) != len(active) * self._spec.ranks_per_node:
            scheme = NO_PARITY
        places = [
            RankPlace(
                rank=seat.rank,
                shard_id=shard_id,
                node=homes[shard_id],
                domain=domain_of(homes[shard_id], self._spec.domains),
                local_index=seat.rank % max(1, len(seats) // len(active)),
                coordinates=seat.coordinates,
                required_bytes=slot_bytes[shard_id],
            )
            for shard_id, seat in seats.items()
        ]
        return new_stripes(places, scheme, self._spec.block_bytes)

    async def load(
        self,
        source: DiskSource,
        snapshot: SnapshotId,
        places: Mapping[str, str],
        incarnation: int,
    ) -> None:
        """Run one process on each node that lacks shards; LoadError if one fails.

        ``places`` maps shards to nodes.  A checkpoint that is damaged is not chosen again.
        """
        world = f"load-{uuid.uuid4().hex[:8]}"
        plans = {
            node: LoadPlan(source.folder, snapshot, tuple(shards), world)
            for node, shards in shards_by_node(source.shards, places).items()
        }
        try:
            await run_step(self._launcher, self._spec, incarnation, "load", plans)
        except DrainError as error:
            if isinstance(error, StepFailedError) and error.status == EXIT_DAMAGED:
                self._refused.add(source.folder)
            raise LoadError(f"{source.folder} could not be loaded: {error}") from error


def lineage_before(drained: Drained, record: JobRecord) -> tuple[Ancestor, ...]:
    """Lineage of a checkpoint: from the job's own notes, or from what another job wrote."""
    own = drained.manifest.job == record.job and record.lineage
    return record.lineage if own else drained.manifest.lineage


def _holds(decision: Decision, shard_id: str, drained: Drained) -> bool:
    """True if an arena holds the very bytes that the checkpoint has of this shard."""
    holding = decision.holdings.get(shard_id)
    slot = None if holding is None else holding.slot(drained.manifest.snapshot)
    if slot is None or slot.record is None:
        return False
    return slot.record.digest_root.hex() == drained.manifest.shards[shard_id].digest_root
