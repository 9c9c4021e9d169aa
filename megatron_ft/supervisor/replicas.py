"""Silent corruption: replicas that must be equal, compared by the digests that ranks took of them.

Ranks that hold the same weights or moments report a digest of each with a sealed shard.  A
snapshot in which some differ is not committed.  Where the first comparison of some tensors finds
them different, they are so by design; so they are where they differ again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.node_messages import REPLICA_DIGEST_BYTES
from megatron_ft.supervisor.ends import ReplicasDiffer
from megatron_ft.supervisor.events import Observers, ReplicasDifferEvent

log = logging.getLogger(__name__)

MOST_REMEMBERED = 256
"""Snapshots in which replicas were equal; older ones are in no slot any more."""
MOST_IN_A_ROW = 2
"""Comparisons in a row in which tensors may differ; then they do so by design.

A tensor that begins to differ later, by the program's own doing, would end each incarnation.  Where
one node alone is odd each time, it is at fault: the budget of restarts ends such a job.
"""
_SHOWN = 4


def shortened(names: Iterable[str]) -> str:
    """Some names for a sentence, of many the first."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}"


Reports = Mapping[str, Sequence[m.ReplicaDigests]]
"""The digests that each shard has reported of one snapshot."""
Part = tuple[str, int]
"""The ranks' group, and a number within its tensors."""


def odd_shards(digests: Mapping[str, bytes]) -> frozenset[str]:
    """The shards that do not agree with more than half of all; all of them if none do.  Pure.

    None where all are equal.
    """
    if len({*digests.values()}) < 2:
        return frozenset()
    usual, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return frozenset(digests)
    return frozenset(shard for shard, digest in digests.items() if digest != usual)


class ReplicaVerdict(NamedTuple):
    """The comparison of one snapshot: the odd ``shards``, and in which tensors they are ``odd``.

    ``unlike`` are tensors that differ by design, as was found out just now.
    """

    shards: frozenset[str]
    odd: frozenset[Part]
    unlike: frozenset[Part]


class ReplicaComparison:
    """Compares snapshot after snapshot, and remembers what was seen of each tensor."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        self._seen: set[str] = set()
        self._unlike: set[Part] = set()
        self._odd_nodes: dict[Part, list[frozenset[str]]] = {}

    def compare(self, reports: Reports, places: Mapping[str, str]) -> ReplicaVerdict:
        """The verdict on one snapshot, whose shards are at these ``places``."""
        shards, odd, unlike = set[str](), set[Part](), set[Part]()
        for group, tables in self._by_group(reports).items():
            found = {} if len({*tables.values()}) == 1 else self._odd(group, tables)
            for part in [p for p in self._odd_nodes if p[0] == group and p not in found]:
                del self._odd_nodes[part]
            for part, those in found.items():
                nodes = frozenset(places[shard] for shard in those)
                self._odd_nodes.setdefault(part, []).append(nodes)
            alarms = {p for p in found if group in self._seen and self._may_be_a_fault(p)}
            shards.update(*(found[part] for part in alarms))
            odd, unlike = odd | alarms, unlike | (found.keys() - alarms)
            self._seen.add(group)
        self._unlike |= unlike
        return ReplicaVerdict(frozenset(shards), frozenset(odd), frozenset(unlike))

    def _may_be_a_fault(self, part: Part) -> bool:
        nodes = self._odd_nodes[part]
        return len(nodes) <= MOST_IN_A_ROW or (len(set(nodes)) == 1 == len(nodes[0]))

    def _by_group(self, reports: Reports) -> dict[str, dict[str, bytes]]:
        """The digests of each group's shards; what only one shard has is left out."""
        tables: dict[str, dict[str, bytes]] = {}
        for shard, reported in reports.items():
            for one in reported:
                tables.setdefault(one.group, {})[shard] = one.digests
                if one.names:
                    self.names[one.group] = one.names
        return {group: found for group, found in tables.items() if len(found) > 1}

    def _odd(self, group: str, tables: Mapping[str, bytes]) -> dict[Part, frozenset[str]]:
        """The odd shards of each tensor that some have otherwise, unless that is by design."""
        size = REPLICA_DIGEST_BYTES
        found = {}
        for number in range(-(-max(map(len, tables.values())) // size)):
            at = slice(number * size, (number + 1) * size)
            shards = odd_shards({shard: table[at] for shard, table in tables.items()})
            if shards and (group, number) not in self._unlike:
                found[group, number] = shards
        return found

    def describe(self, parts: Collection[Part]) -> str:
        """The names of some tensors, for people; of many the first."""
        return shortened(self._name(part) for part in sorted(parts))

    def _name(self, part: Part) -> str:
        names = self.names.get(part[0], ())
        return names[part[1]] if part[1] < len(names) else f"tensor {part[1]}"


class ReplicaWatch:
    """The comparison over all incarnations of one job, and what follows from it.

    ``differ`` is set once a snapshot was given up because some do.
    """

    def __init__(self, observers: Observers) -> None:
        self.differ = asyncio.Event()
        self._observers, self._comparison = observers, ReplicaComparison()
        self._failure, self._iteration = ReplicasDiffer(""), 0
        self._equal: list[SnapshotId] = []
        self._ending = -1

    def judge(
        self, places: Mapping[str, str], snapshot: SnapshotId, iteration: int, reports: Reports
    ) -> str:
        """The reason why a snapshot that is sealed everywhere must be given up, or nothing.

        ``places`` are the nodes of its shards.  An error of the comparison's own is logged.
        """
        if not any(reports.values()):
            return ""
        if snapshot.incarnation == self._ending:
            return "replicas differed before, and this incarnation is about to end"
        try:
            verdict = self._comparison.compare(reports, places)
            self._note_unlike(verdict.unlike, iteration)
            if verdict.odd:
                self._ending = snapshot.incarnation
                return self._blame(verdict, iteration, places)
        except Exception:
            log.exception("replicas of snapshot %s could not be compared", snapshot)
            return ""
        self._equal = [*self._equal[1 - MOST_REMEMBERED :], snapshot]
        return ""

    def _note_unlike(self, parts: Collection[Part], iteration: int) -> None:
        if parts:
            names = self._comparison.describe(parts)
            text = f"replicas of {names} are not equal: they are taken to differ by design, and "
            text += "are not compared from now on (compare_except declares them)"
            self._observers.emit("replicas_unlike", text, iteration=iteration, tensors=names)

    def _blame(self, verdict: ReplicaVerdict, iteration: int, places: Mapping[str, str]) -> str:
        shards, names = sorted(verdict.shards), self._comparison.describe(verdict.odd)
        who = [f"{shard} on {places[shard]}" for shard in shards]
        nodes = sorted({places[shard] for shard in shards})
        text = f"replicas of {names} differ at iteration {iteration}: {shortened(who)}"
        event = ReplicasDifferEvent(iteration=iteration, shards=shards, nodes=nodes, tensors=names)
        self._observers.emit(event, text)
        node = nodes[0] if len(nodes) == 1 else ""
        self._failure = ReplicasDiffer(text, node)
        self._iteration = iteration
        self.differ.set()
        return text

    async def until_differ(self) -> ReplicasDiffer:
        """Wait until a snapshot is given up; ``undo`` is due then."""
        await self.differ.wait()
        return self._failure

    def undo(self, held: Collection[tuple[SnapshotId, int]]) -> int:
        """The iteration from which on nothing is to be restored.

        ``held`` are the snapshots in memory and on disk, and their iterations.  The newest in which
        replicas were equal is good; if none of them was compared the newest has to do.
        """
        self.differ.clear()
        found = dict(held)
        good = max({*found} & {*self._equal} or found, default=None)
        return self._iteration if good is None else found[good] + 1
