"""The chain of snapshots that the current life of the job descends from.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.identity import Ancestor, SnapshotId


def on_lineage(snapshot: SnapshotId, lineage: Sequence[Ancestor]) -> bool:
    """Whether ``snapshot`` is one that the newest incarnation of ``lineage`` descends from.

    An incarnation's own snapshots all are.  Those of an older incarnation are only up to
    the snapshot from which its successor started: what it captured after that was
    rolled back, and may hold an iteration that exists a second time with other bytes.
    """
    limit: SnapshotId | None = None
    for ancestor in reversed(lineage):
        if snapshot.incarnation == ancestor.incarnation:
            return limit is None or snapshot <= limit
        limit = ancestor.parent
        if limit is None:
            return False
    return False


def extend(
    lineage: Sequence[Ancestor], incarnation: int, parent: SnapshotId | None, *, keep: int = 64
) -> tuple[Ancestor, ...]:
    """The lineage of a new incarnation that starts from ``parent`` (None: from scratch or disk).

    Ancestors that ``parent`` does not descend from drop out, and only the newest ``keep``
    stay; a snapshot older than all of them counts as off the lineage.
    """
    if parent is None:
        return (Ancestor(incarnation, None),)
    older = [a for a in lineage if a.incarnation <= parent.incarnation]
    return (*older, Ancestor(incarnation, parent))[-keep:]
