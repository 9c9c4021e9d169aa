"""Drains of the protocol model, what is on the disk, and the choice that a recovery makes.

Choosing (checkpoint/drained.py), what must be loaded (supervisor/disk_restore.py) and what is
removed (checkpoint/retention.py) are the real ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.checkpoint.decide import Decision, StripeState
from megatron_ft.checkpoint.disk_format import Manifest, ShardFile
from megatron_ft.checkpoint.drained import DiskCriteria, Drained, choose, superfluous
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId
from megatron_ft.core.scheme import NO_PARITY, Scheme
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.disk_restore import DiskRestores
from tests.protocol.model.memory import Tag, root_of
from tests.protocol.model.processes import Reader

if TYPE_CHECKING:
    from tests.protocol.model.world import World

JOB = uuid.UUID(int=1)
KEEP = 1


@dataclass(frozen=True)
class Checkpoint:
    """What is on the disk, with a manifest."""

    snapshot: SnapshotId
    iteration: int
    lineage: tuple[Ancestor, ...]
    files: tuple[tuple[str, Tag], ...]

    def drained(self) -> Drained:
        """As the search in a drain folder finds it."""
        shards = {
            shard: ShardFile(shard, 1, "", root_of(tag).hex(), ShardPlacement(rank, (), 1))
            for rank, (shard, tag) in enumerate(self.files)
        }
        known = (self.snapshot, self.iteration, "protected", self.lineage, "", shards)
        return Drained(Path(str(self.snapshot)), Manifest(1, JOB, *known))


@dataclass
class Drain:
    """One drain of supervisor/drains.py: hold, write, publish, tidy up, release.

    ``waiting`` counts nodes that have not answered yet.  ``readers`` read the shards.
    """

    snapshot: SnapshotId
    iteration: int
    lineage: tuple[Ancestor, ...]
    nodes: tuple[str, ...]
    stage: str = "holding"
    waiting: int = 0
    failed: bool = False
    readers: dict[str, Reader] = field(default_factory=dict)
    files: dict[str, Tag] = field(default_factory=dict)

    def answered(self, request: Any, answer: Any) -> None:
        wanted = {"holding": m.Hold, "releasing": m.Unhold}.get(self.stage)
        if isinstance(request, wanted or ()):
            self.waiting -= 1
            self.failed |= isinstance(answer, m.Refused)


def tidied(disk: Sequence[Checkpoint], lineage: tuple[Ancestor, ...]) -> list[Checkpoint]:
    """What stays when a drain of this lineage has been published."""
    named = {str(one.snapshot): one.snapshot for one in disk}
    gone = superfluous(named, KEEP, lineage)
    return [one for one in disk if str(one.snapshot) not in gone]


def choice(
    disk: Sequence[Checkpoint], shards: int, lineage: tuple[Ancestor, ...], memory: Decision
) -> Checkpoint | None:
    """The checkpoint that a recovery takes, if any."""
    wanted = DiskCriteria(shards, lineage, memory.snapshot)
    taken = choose([one.drained() for one in disk], wanted).taken
    if taken is None:
        return None
    return next(one for one in disk if one.snapshot == taken.manifest.snapshot)


class _Restores(DiskRestores):
    """The real one, for stripes that are known."""

    def __init__(self, stripes: tuple[StripeState, ...]) -> None:
        self._known = stripes

    def _stripes(
        self, drained: Drained, active: Sequence[str], scheme: Scheme
    ) -> tuple[StripeState, ...]:
        return self._known


def decide_with(
    taken: Checkpoint, memory: Decision, world: World
) -> tuple[Decision, tuple[str, ...]]:
    """What the recovery does with a checkpoint, and which shards are loaded from it."""
    corrupt: Collection[tuple[str, SnapshotId]] = world.known_bad
    restores = _Restores(world.stripes)
    decision, source = restores.decision(taken.drained(), memory, world.active, NO_PARITY, corrupt)
    return decision, source.shards
