"""The standing of a job: the snapshots and the checkpoint that a failure would fall back to.

Everybody reads it; only its methods change it, so that each fact has one author.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.exposure import Exposure, Fallbacks, StripeMap


class Mark(NamedTuple):
    """A snapshot by its identity and its iteration."""

    snapshot: SnapshotId
    iteration: int


class Committed(NamedTuple):
    """A committed snapshot; ``level`` is "local" or "protected"."""

    snapshot: SnapshotId
    iteration: int
    level: str


class Standing:
    """Everything that survives, as far as the supervisor knows.

    ``committed`` and ``protected`` are the newest snapshot in memory and the newest with parity.
    ``durable`` is the newest drained checkpoint of this lineage.  ``restoring`` is the snapshot
    that the incarnation restores; ``resumed_from`` is its iteration once all have it, -1 for a
    start from nothing, and None before.  ``held`` are the committed snapshots of each node, as
    its last heartbeat named them.
    """

    def __init__(self, damage: DamagedShards) -> None:
        self.committed: Committed | None = None
        self.protected: Mark | None = None
        self.durable: Mark | None = None
        self.restoring: SnapshotId | None = None
        self.resumed_from: int | None = None
        self.held: dict[str, tuple[m.HeldSnapshot, ...]] = {}
        self.damage = damage
        self._judged: tuple[Any, Exposure] | None = None

    def restores(self, snapshot: SnapshotId | None) -> None:
        """Record what this incarnation is about to restore, None for nothing."""
        self.restoring, self.resumed_from = snapshot, None

    def resumes(self, iteration: int) -> None:
        """Record the iteration that training resumes from, -1 for a start from nothing."""
        self.resumed_from = iteration

    def commits(self, snapshot: SnapshotId, iteration: int, level: str) -> None:
        """Record a snapshot that is committed on every node."""
        self.committed = Committed(snapshot, iteration, level)
        if level == "protected":
            self.protected = Mark(snapshot, iteration)
            self.damage.all_accepted()

    def loses_memory(self) -> None:
        """Record that no snapshot in memory serves: training starts from something else."""
        self.committed = self.protected = None

    def drains(self, snapshot: SnapshotId, iteration: int) -> None:
        """Record the newest checkpoint that is complete on disk."""
        self.durable = Mark(snapshot, iteration)

    def gives_up_checkpoint(self) -> None:
        """Record that the checkpoint on disk is of a lineage that was given up."""
        self.durable = None

    def holds(self, node: str, held: tuple[m.HeldSnapshot, ...]) -> None:
        """Record what a node says to hold."""
        self.held[node] = held

    def exposure(self, stripe_map: StripeMap) -> Exposure:
        """The exposure of a job with these stripes; computed again only after a change."""
        basis = (stripe_map, dict(self.held), set(self.damage.lost), self.durable)
        if self._judged is None or self._judged[0] != basis:
            self._judged = basis, Exposure(*basis)
        return self._judged[1]

    def fallbacks(self, stripe_map: StripeMap | None) -> Fallbacks:
        """The snapshots that failures would fall back to; without stripes those committed last."""
        if stripe_map is not None:
            return self.exposure(stripe_map).memory()
        committed, protected = self.committed, self.protected
        return Fallbacks(
            None if committed is None else m.HeldSnapshot(*committed[:2], False),
            None if protected is None else m.HeldSnapshot(*protected, True),
        )

    def newest_is_damaged(self) -> bool:
        """True if shards of the newest committed snapshot count as lost."""
        newest = self.committed
        return newest is not None and any(of == newest.snapshot for _, of in self.damage.lost)

    def beyond_repair(self, nodes: Collection[str], stripe_map: StripeMap) -> SnapshotId | None:
        """The newest committed snapshot if no failure can fall back to it, or None.

        ``nodes`` are those that train; while one has not said what it holds, nothing is known.
        """
        newest = self.committed
        if newest is None or not self.held.keys() >= set(nodes) or not self.newest_is_damaged():
            return None
        crash = self.fallbacks(stripe_map).crash
        return newest.snapshot if crash is None or crash.snapshot < newest.snapshot else None

    def report(self, stripe_map: StripeMap | None) -> dict[str, Any]:
        """The standing as JSON, for the job's summary."""
        crash, node_loss = self.fallbacks(stripe_map)
        held = [one for some in self.held.values() for one in some]
        newest = self.committed
        committed = None if newest is None else {**_named(newest), "level": newest.level}
        return {
            "resumed_from": self.resumed_from,
            "damaged_shards": self.damage.held(held),
            "committed": committed,
            "protected": None if self.protected is None else _named(self.protected),
            "crash": None if crash is None else crash.iteration,
            "node_loss": None if node_loss is None else node_loss.iteration,
            "durable": None if self.durable is None else _named(self.durable),
        }


def _named(mark: Mark | Committed) -> Mapping[str, Any]:
    return {"snapshot": str(mark.snapshot), "iteration": mark.iteration}
