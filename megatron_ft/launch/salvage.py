"""Bringing memory to disk when a node is lost and nobody takes its place.

What the lost node held is still in the parity of the others.  It is rebuilt on nodes that
are left, beside their own shards, and everything is drained before the job stops.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
