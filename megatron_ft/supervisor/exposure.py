"""The exposure of a job: what each loss of nodes would fall back to now.  Pure.

It is the recovery's decision (checkpoint/decide.py) on what the nodes say to hold, without those
that are lost; what memory cannot serve falls to the newest drained checkpoint.  The two agree
where snapshots are committed.  One that is under way may turn out to serve, if it is whole.

A loss matters to the stripes on the lost nodes only.  So two nodes that share none fall back to
what serves after either loss alone, and every pair is judged, however many nodes there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

from megatron_ft.checkpoint.decide import makes_up
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m

MOST_GROUPS = 64
"""Groups of pairs that a report lists, the worst first."""


class StripeNodes(NamedTuple):
    """The nodes of those members of a stripe whose bytes are right, and how many others it has."""

    nodes: tuple[str, ...]
    damaged: int
    parity_members: int


class StripeMap:
    """The stripes of a job by their nodes, equal ones once; a shard of no stripe is one alone.

    ``places`` are the node of each shard, ``stripes`` those with parity.
    """

    def __init__(self, places: Mapping[str, str], stripes: Sequence[m.StripeOrder]) -> None:
        self._places = places
        known = {shard for stripe in stripes for shard in stripe.members}
        self._stripes = [(s.members, s.parity_members) for s in stripes]
        self._stripes += [((shard,), 0) for shard in places if shard not in known]
        self.nodes = sorted(set(places.values()))
        self.stripes = Counter(self._nodes(i) for i in range(len(self._stripes)))
        self.of_node = _by_node(self.stripes)
        self.groups = sorted({tuple(sorted(set(stripe.nodes))) for stripe in self.stripes})
        self._judges: dict[tuple[bool, ...], Judge] = {}

    def _nodes(self, index: int, damaged: Collection[str] = ()) -> StripeNodes:
        members, parity_members = self._stripes[index]
        good = sorted(self._places[shard] for shard in members if shard not in damaged)
        return StripeNodes(tuple(good), len(members) - len(good), parity_members)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {s: i for i, (members, _) in enumerate(self._stripes) for s in members}

    def without(self, damaged: Collection[str]) -> Counter[StripeNodes]:
        """The stripes where these shards count as lost."""
        stripes = self.stripes.copy()
        for index in {self._index[shard] for shard in damaged if shard in self._index}:
            stripes[self._nodes(index)] -= 1
            stripes[self._nodes(index, damaged)] += 1
        return +stripes

    def judge(self, holders: Sequence[Mapping[str, bool]], bad: Sequence[Collection[str]]) -> Judge:
        """The judge of snapshots.

        ``holders`` are, for each snapshot, the nodes that have it, True where with parity, and
        ``bad`` its damaged shards.  Between commits the same is asked again: each snapshot is
        whole, and has parity or has none.
        """
        kinds = [set(nodes.values()) for nodes in holders]
        parity = tuple(True in kind for kind in kinds)
        alike = all(len(kind) == 1 for kind in kinds) and not any(bad)
        if not alike or any(len(nodes) < len(self.nodes) for nodes in holders):
            return Judge(self, holders, bad)
        if parity not in self._judges:
            self._judges[parity] = Judge(self, holders, bad)
        return self._judges[parity]


def _by_node(stripes: Iterable[StripeNodes]) -> dict[str, list[StripeNodes]]:
    found: dict[str, list[StripeNodes]] = {}
    for stripe in stripes:
        for node in set(stripe.nodes):
            found.setdefault(node, []).append(stripe)
    return found


class _Serving:
    """One snapshot: which stripes serve it as it stands, and after a loss."""

    def __init__(
        self, stripe_map: StripeMap, holders: Mapping[str, bool], bad: Collection[str]
    ) -> None:
        stripes = stripe_map.without(bad) if bad else stripe_map.stripes
        self._of_node = _by_node(stripes) if bad else stripe_map.of_node
        self._holders = holders
        self._failing = {stripe for stripe in stripes if not self._bears(stripe, ())}

    def serves(self, lost: Collection[str]) -> bool:
        touched = {stripe for node in lost for stripe in self._of_node.get(node, ())}
        return self._failing <= touched and all(self._bears(stripe, lost) for stripe in touched)

    def _bears(self, stripe: StripeNodes, lost: Collection[str]) -> bool:
        parity = [self._holders[n] for n in stripe.nodes if n in self._holders and n not in lost]
        lacking = stripe.damaged + len(stripe.nodes) - len(parity)
        return makes_up(lacking, stripe.parity_members, all(parity))


class Pairs(NamedTuple):
    """Pairs that fall back to less than the worse of their two nodes alone.

    They are any two of ``nodes``, or one of these and one of ``others``; ``fallback`` is the
    number of what they fall back to.
    """

    nodes: Sequence[str]
    others: Sequence[str]
    fallback: int


class Judge:
    """Tells which of several snapshots, numbered from the newest on, serve after a loss."""

    def __init__(
        self,
        stripe_map: StripeMap,
        holders: Sequence[Mapping[str, bool]],
        bad: Sequence[Collection[str]],
    ) -> None:
        self._map = stripe_map
        self._serving = [_Serving(stripe_map, *one) for one in zip(holders, bad, strict=True)]
        self._pairs: dict[int, list[Pairs]] = {}

    def serving(self, lost: Collection[str]) -> Iterator[int]:
        """The numbers of the snapshots that memory could serve without these nodes."""
        return (i for i, one in enumerate(self._serving) if one.serves(lost))

    @cached_property
    def singles(self) -> dict[str, tuple[int, ...]]:
        """Snapshots that serve without each node."""
        return {node: tuple(self.serving((node,))) for node in self._map.nodes}

    @cached_property
    def any_node(self) -> Iterable[int]:
        """Snapshots that serve after the loss of any single node."""
        return sorted(set.intersection(*map(set, self.singles.values())))

    def pairs(self, last: int) -> list[Pairs]:
        """All pairs that cost more than either node alone, the worst first.

        Fallback ``last`` is no snapshot of these: it is there after any loss, and none behind it
        counts.  A pair that is in several groups falls back to what the first one says.
        """
        if last not in self._pairs:
            together = sorted(self._together(last), key=lambda group: -group.fallback)
            self._pairs[last] = [*together, *self._apart(last)]
        return self._pairs[last]

    def _together(self, last: int) -> Iterator[Pairs]:
        """Pairs that share a stripe."""
        alone = {node: min((*serving, last)) for node, serving in self.singles.items()}
        seen = set[tuple[str, str]]()
        for nodes in self._map.groups:
            worse: dict[int, list[tuple[str, str]]] = {}
            for pair in (pair for pair in combinations(nodes, 2) if pair not in seen):
                fallback = min(next(self.serving(pair), last), last)
                if fallback != max(alone[pair[0]], alone[pair[1]]):
                    worse.setdefault(fallback, []).append(pair)
                seen.add(pair)
            for fallback, pairs in worse.items():
                whole = len(pairs) == comb(len(nodes), 2)
                yield from (Pairs(one, (), fallback) for one in ([nodes] if whole else pairs))

    def _apart(self, last: int) -> Iterator[Pairs]:
        """Pairs that share no stripe: damage of two snapshots in two places costs both."""
        alike: dict[tuple[int, ...], list[str]] = {}
        for node, serving in self.singles.items():
            alike.setdefault(serving, []).append(node)
        for (one, nodes), (other, others) in combinations(alike.items(), 2):
            fallback = min((*set(one).intersection(other), last))
            if fallback != max(min((*one, last)), min((*other, last))):
                yield Pairs(nodes, others, fallback)


class Fallback(NamedTuple):
    """A snapshot that a loss falls back to, and whether from "memory" or "disk"."""

    snapshot: SnapshotId
    iteration: int
    source: str


NOTHING = Fallback(SnapshotId(0, 0), -1, "")
"""Neither memory nor a drained checkpoint serves."""


class Fallbacks(NamedTuple):
    """The newest snapshots in memory that serve after each failure, None where none does.

    ``crash`` is that of any trainers, ``node_loss`` that of any one node.
    """

    crash: m.HeldSnapshot | None
    node_loss: m.HeldSnapshot | None


class Exposure:
    """Fallbacks of a job, for what each node holds.

    ``damaged`` are the shards that count as lost for a snapshot, ``durable`` is the newest drained
    checkpoint.  A node that says nothing holds nothing.
    """

    def __init__(
        self,
        stripe_map: StripeMap,
        held: Mapping[str, Sequence[m.HeldSnapshot]],
        damaged: Collection[tuple[str, SnapshotId]] = (),
        durable: tuple[SnapshotId, int] | None = None,
    ) -> None:
        found: dict[tuple[SnapshotId, int], dict[str, bool]] = {}
        for node in stripe_map.nodes:
            for snapshot, iteration, protected in held.get(node, ()):
                found.setdefault((snapshot, iteration), {})[node] = protected
        order = sorted(found, reverse=True)
        self._memory = [m.HeldSnapshot(*one, all(found[one].values())) for one in order]
        bad = [{shard for shard, of in damaged if of == snapshot} for snapshot, _ in order]
        self._judge = stripe_map.judge([found[one] for one in order], bad)
        # As in a recovery, memory's goes before a drained one of the same snapshot.
        drained = NOTHING if durable is None else Fallback(*durable, "disk")
        newer = [one for one in self._memory if one.snapshot >= drained.snapshot]
        self._fallbacks = [Fallback(s, iteration, "memory") for s, iteration, _ in newer]
        self._fallbacks.append(drained)

    def memory(self) -> Fallbacks:
        """The fallbacks to what is in memory."""
        served = self._judge.serving(()), self._judge.any_node
        numbers = [next(iter(one), None) for one in served]
        return Fallbacks(*(None if one is None else self._memory[one] for one in numbers))

    def after(self, lost: Collection[str]) -> Fallback:
        """The fallback when these nodes are lost."""
        return self._first(self._judge.serving(lost))

    def _first(self, serving: Iterable[int]) -> Fallback:
        last = len(self._fallbacks) - 1
        return self._fallbacks[min(next(iter(serving), last), last)]

    @cached_property
    def report(self) -> dict[str, Any]:
        """Members of the job's summary: single nodes, and pairs.

        The nodes of the most frequent fallback are not named: they are all others that train.
        """
        nodes_of: dict[Fallback, list[str]] = {}
        for node, serving in self._judge.singles.items():
            nodes_of.setdefault(self._first(serving), []).append(node)
        usual = max(nodes_of, key=lambda one: len(nodes_of[one]), default=NOTHING)
        unusual = [one for one in sorted(nodes_of) if one != usual]
        pairs = self._judge.pairs(len(self._fallbacks) - 1)
        return {
            "any_node": _plain(usual),
            "some_nodes": [{**_plain(one), "nodes": nodes_of[one]} for one in unusual],
            "pairs": [
                {**_plain(self._fallbacks[one]), "nodes": list(nodes), "others": list(others)}
                for nodes, others, one in pairs[:MOST_GROUPS]
            ],
            "more_pairs": max(0, len(pairs) - MOST_GROUPS),
        }


def redone(at: int, fallback: int) -> int:
    """Iterations made again by a job at iteration ``at`` that falls back; -1 is its beginning."""
    return max(0, at - max(fallback, 0))


def _plain(fallback: Fallback) -> dict[str, Any]:
    return {"iteration": fallback.iteration, "source": fallback.source}
