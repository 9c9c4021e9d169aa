"""Which shards protect each other: stripes over distinct failure domains, by topology.

The i-th local rank of each of N nodes, at most m of one failure domain, form a stripe,
and all stripes of a node set share its nodes: when nodes are lost, few stripes lose
more than one member.  Node sets are balanced, so that a remainder makes all sets a
little smaller instead of one set tiny; a shorter set keeps its parity members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.core.errors import ProtectionError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.domains import check_domains, stripe_sets


@dataclass(frozen=True)
class RankPlace:
    """Where one trainer rank runs, and how many bytes its shard's slot must have.

    ``coordinates`` are its model-parallel coordinates without the data-parallel one:
    ranks that agree in them have shards of one size.
    """

    rank: int
    shard_id: str
    node: str
    domain: str
    local_index: int
    coordinates: tuple[int, ...]
    required_bytes: int


@dataclass(frozen=True)
class StripePlan:
    """One stripe: its members in order, the node of each, and the padded length of a slot.

    ``data_bytes`` is a multiple of data_members x the block size, the same for all members.
    """

    index: int
    kind: str
    members: tuple[str, ...]
    nodes: tuple[str, ...]
    data_members: int
    parity_members: int
    data_bytes: int


@dataclass(frozen=True)
class _Node:
    name: str
    domain: str
    ranks: tuple[RankPlace, ...]

    @property
    def signature(self) -> tuple[tuple[int, ...], ...]:
        return tuple(rank.coordinates for rank in self.ranks)


def plan_stripes(
    ranks: Sequence[RankPlace], scheme: Scheme, *, block_bytes: int = BLOCK_BYTES
) -> tuple[StripePlan, ...]:
    """Every shard in exactly one stripe, and at most m members of one failure domain in each.

    ProtectionError, which names the domain and a scheme that can be met, if there are too
    few nodes, too many of one domain, or if a stripe would be left too short.
    ValueError if a shard or a node is described twice in different ways.
    """
    nodes = _nodes(ranks)
    plans: list[StripePlan] = []
    for node_set in _node_sets(nodes, scheme):
        for members in _stripes_of(node_set):
            plans.append(_plan(len(plans), members, scheme, block_bytes))
    return tuple(plans)


def padded_bytes(required: Iterable[int], data_members: int, block_bytes: int) -> int:
    """The longest shard, rounded up to whole blocks in each of its chunks; never zero."""
    unit = data_members * block_bytes
    return -(-max(1, *required) // unit) * unit


def _nodes(ranks: Sequence[RankPlace]) -> list[_Node]:
    if len({place.shard_id for place in ranks}) != len(ranks):
        raise ValueError("two ranks bring the same shard id: shard ids must be unique in a job")
    by_node: dict[str, list[RankPlace]] = defaultdict(list)
    for place in ranks:
        by_node[place.node].append(place)
    nodes = []
    for name, places in by_node.items():
        domains = {place.domain for place in places}
        if len(domains) != 1:
            raise ValueError(f"node {name} is said to be in failure domains {sorted(domains)}")
        ordered = tuple(sorted(places, key=lambda place: (place.local_index, place.rank)))
        nodes.append(_Node(name, domains.pop(), ordered))
    return nodes


def _node_sets(nodes: Sequence[_Node], scheme: Scheme) -> list[list[_Node]]:
    by_domain: dict[str, list[_Node]] = defaultdict(list)
    for node in sorted(nodes, key=_node_order):
        by_domain[node.domain].append(node)
    if scheme.kind == "none":
        return [[node] for group in by_domain.values() for node in group]
    check_domains([n.name for n in nodes], {n.name: n.domain for n in nodes}, scheme)
    count = stripe_sets(len(nodes), max(map(len, by_domain.values())), scheme)
    assert count is not None, "check_domains has accepted what has no division"
    return _divide(by_domain, count)


def _divide(by_domain: Mapping[str, Sequence[_Node]], count: int) -> list[list[_Node]]:
    """``count`` sets of nearly equal size, with few nodes of one domain in each.

    With one node a domain, neighbours stay together, so that equal shards meet.  With
    several, dealing the nodes out domain by domain keeps those of a domain apart.
    """
    groups = sorted(by_domain.values(), key=lambda group: _node_order(group[0]))
    nodes = [node for group in groups for node in group]
    if max(map(len, groups)) > 1:
        return [nodes[start::count] for start in range(count)]
    short, longer = divmod(len(nodes), count)
    starts = [i * short + min(i, longer) for i in range(count + 1)]
    return [nodes[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def _node_order(node: _Node) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Nodes with the same model-parallel coordinates are adjacent, then by first rank."""
    return node.signature, node.ranks[0].rank


def _stripes_of(nodes: Sequence[_Node]) -> list[list[RankPlace]]:
    most = max(len(node.ranks) for node in nodes)
    return [[node.ranks[i] for node in nodes if i < len(node.ranks)] for i in range(most)]


def _plan(index: int, members: list[RankPlace], scheme: Scheme, block_bytes: int) -> StripePlan:
    if len(members) <= scheme.parity_members:
        raise ProtectionError(
            f"only {', '.join(place.node for place in members)} have a local rank of this number, "
            f"too few for a stripe of {scheme}, which needs {scheme.parity_members + 1}; run the "
            "same number of ranks on every node, or take fewer parity members"
        )
    actual = scheme.shortened(len(members))
    return StripePlan(
        index=index,
        kind=actual.kind,
        members=tuple(place.shard_id for place in members),
        nodes=tuple(place.node for place in members),
        data_members=actual.data_members,
        parity_members=actual.parity_members,
        data_bytes=padded_bytes(
            [place.required_bytes for place in members], actual.data_members, block_bytes
        ),
    )
