"""Summary of the job for ``megatron-ft status``: what failures fall back to, and skipped snapshots.

The coordinator has every SMP keep it.  It is in parts, by how often they change, and a heartbeat
brings a node those that it lacks: an iteration's number nearly always, the names of all nodes
when one was replaced.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.job_messages import summary_digest


class SummaryParts:
    """Encoded parts of a job's summary, made anew from ``view`` at most every ``seconds``.

    What they cost grows with the job, and each of its nodes has a heartbeat of its own.
    """

    def __init__(self, view: Callable[[], Mapping[str, Any]], seconds: float) -> None:
        self._view, self._seconds = view, seconds
        self._until = 0.0
        self._parts: dict[str, tuple[bytes, bytes]] = {}

    def unknown_to(self, held: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those parts that a node lacks; ``held`` are the digests of those that it has."""
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + self._seconds
            parts = {name: json.dumps(part).encode() for name, part in self._view().items()}
            self._parts = {name: (summary_digest(part), part) for name, part in parts.items()}
        return {k: part for k, (known, part) in self._parts.items() if held.get(k) != known}


class Skips:
    """``total`` counts over the whole job, without those of the present period of skipping.

    These are ``now``, as of the last ``begin``.  Progress is the fastest trainer's iteration.
    """

    def __init__(self) -> None:
        self.total = self.now = 0
        self._since: int | None = None

    def begin(self, progress: int, interval: int) -> bool:
        """A snapshot could not be permitted.  True if this starts a period of skipping."""
        started = self._since is None
        if self._since is None:
            self._since = progress
        self.now = max(0, progress // interval - self._since // interval)
        return started

    def end(self, progress: int, interval: int) -> int | None:
        """Snapshots are permitted again: how many were due meanwhile, None if none were held."""
        if self._since is None:
            return None
        skipped = max(0, progress // interval - self._since // interval)
        self.total += skipped
        self._since, self.now = None, 0
        return skipped


class Fallbacks(NamedTuple):
    """The newest snapshot that serves after each failure, None where memory serves none.

    ``crash`` is that of any trainers, ``node_loss`` that of any one node.
    """

    crash: m.HeldSnapshot | None
    node_loss: m.HeldSnapshot | None


def fallbacks(
    held: Mapping[str, Sequence[m.HeldSnapshot]],
    places: Mapping[str, str],
    stripes: Sequence[m.StripeOrder],
    damaged: Collection[tuple[str, SnapshotId]],
) -> Fallbacks:
    """Judge the committed snapshots that every node holds.

    ``held`` are each node's, ``places`` the node of each shard, ``stripes`` those with parity,
    and ``damaged`` the shards that count as lost for a snapshot.
    """
    crash = node_loss = None
    for one in _everywhere([held.get(node, ()) for node in set(places.values())]):
        bad = {shard for shard, snapshot in damaged if snapshot == one.snapshot}
        if not bad or (one.protected and _bears(stripes, places, bad, nodes_lost=0)):
            crash = max(crash or one, one)
        if one.protected and _bears(stripes, places, bad, nodes_lost=1):
            node_loss = max(node_loss or one, one)
    return Fallbacks(crash, node_loss)


def _everywhere(nodes: Sequence[Sequence[m.HeldSnapshot]]) -> Iterable[m.HeldSnapshot]:
    """Snapshots that all nodes hold; protected where all of them have parity."""
    counts = Counter(one.snapshot for node in nodes for one in node)
    local = {one.snapshot for node in nodes for one in node if not one.protected}
    for one in nodes[0] if nodes else ():
        if counts[one.snapshot] == len(nodes):
            yield one._replace(protected=one.snapshot not in local)


def _bears(
    stripes: Sequence[m.StripeOrder], places: Mapping[str, str], bad: set[str], *, nodes_lost: int
) -> bool:
    """Tell if parity makes up for the bad shards, and for those of any lost node beside them."""
    if not bad <= {shard for stripe in stripes for shard in stripe.members}:
        return False
    if nodes_lost and {s for stripe in stripes for s in stripe.members} != set(places):
        return False
    for stripe in stripes:
        gone = bad & set(stripe.members)
        whole = Counter(places[shard] for shard in stripe.members if shard not in gone)
        worst = max(whole.values(), default=0) if nodes_lost else 0
        if len(gone) + worst > stripe.parity_members:
            return False
    return True
