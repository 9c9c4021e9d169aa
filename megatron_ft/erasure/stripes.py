"""Stripes over distinct failure domains, planned by topology: shards that protect each other.

The i-th local rank of each of N nodes, at most m of one failure domain, form a stripe,
and all stripes of a node set share its nodes: when nodes are lost, few stripes lose
more than one member.  Node sets are balanced, so that a remainder makes all sets a
little smaller instead of one set tiny; a shorter set keeps its parity members.

A stripe survives the loss of any m members, so it survives the loss of a domain if it
holds at most m members of it.  Dealing nodes out domain by domain over c stripes puts at
most ceil(g / c) of a domain's g nodes into one, and no way of dividing does better; so
the rule can be met exactly when some c gives few enough nodes of the largest domain and
stripes that are neither too long nor too short.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.core.errors import ProtectionError
from megatron_ft.core.scheme import MAX_MEMBERS, Scheme, largest_scheme

Domains = Mapping[str, str]
"""Failure domain by node; a node that is not named is a domain of its own."""


def domain_of(node: str, domains: Domains) -> str:
    """The failure domain of a node."""
    return domains.get(node, node)


def members_of(nodes: Iterable[str], domains: Domains) -> dict[str, list[str]]:
    """Nodes by failure domain, both in the order in which they were given."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(domain_of(node, domains), []).append(node)
    return found


def stripe_sets(node_count: int, largest_domain: int, scheme: Scheme) -> int | None:
    """Number of sets that nodes are divided into so that none holds more than m of a domain.

    The fewest, so that stripes are as long as they can be; every set has m+1 to k+m nodes
    then.  None if that is impossible.  A scheme without parity has one set a node.
    """
    parity = scheme.parity_members
    if not parity:
        return node_count
    fewest = max(-(-node_count // scheme.members), -(-largest_domain // parity))
    return fewest if fewest <= node_count // (parity + 1) else None


def check_domains(nodes: Sequence[str], domains: Domains, scheme: Scheme) -> None:
    """ProtectionError if stripes over these nodes would hold more than m of one domain.

    It names the domain, and a scheme that these nodes can have.
    """
    if not scheme.parity_members:
        return
    if len(nodes) < scheme.members:
        raise ProtectionError(
            f"{scheme} needs {scheme.members} nodes, there are {len(nodes)}: "
            f"{', '.join(nodes)}; the largest that can be met is "
            f"{largest_scheme(scheme, len(nodes))}"
        )
    name, largest = max(members_of(nodes, domains).items(), key=lambda pair: len(pair[1]))
    if stripe_sets(len(nodes), len(largest), scheme) is None:
        raise ProtectionError(_refusal(nodes, name, largest, scheme))


def crowded(
    stripes: Iterable[Collection[str]], domains: Domains, most: int
) -> list[tuple[str, list[str]]]:
    """Failure domains of which some stripe holds more than ``most`` nodes, with those nodes.

    ``stripes`` are given by the nodes of their members.
    """
    found = (pair for nodes in stripes for pair in members_of(nodes, domains).items())
    return [(name, nodes) for name, nodes in found if len(nodes) > most]


def possible_scheme(node_count: int, largest_domain: int, wanted: Scheme) -> Scheme | None:
    """The scheme nearest to the wanted one that these nodes can have, None if there is none.

    As much parity as wanted or else less, in longer stripes if need be; only where that is
    impossible more parity.
    """
    parities = [*range(wanted.parity_members, 0, -1), *range(wanted.parity_members + 1, node_count)]
    for parity in parities:
        kind = wanted.kind if wanted.kind != "xor" or parity == 1 else "rs"
        most = node_count - parity
        shortest = min(wanted.data_members, most)
        for data in [1] if kind == "replica" else range(shortest, most + 1):
            if data < 1 or data + parity > MAX_MEMBERS:
                continue
            scheme = Scheme(kind, data, parity)
            if stripe_sets(node_count, largest_domain, scheme) is not None:
                return scheme
    return None


def _refusal(nodes: Sequence[str], name: str, largest: Sequence[str], scheme: Scheme) -> str:
    parity = scheme.parity_members
    text = (
        f"{len(nodes)} nodes cannot be divided into stripes of {scheme}, which have {parity + 1} "
        f"to {scheme.members} nodes"
    )
    if len(largest) > 1:
        text += (
            f" and at most {parity} of one failure domain; {name} holds {len(largest)} "
            f"({', '.join(largest)})"
        )
    possible = possible_scheme(len(nodes), len(largest), scheme)
    other = f"or {possible}, the nearest that can be met" if possible else "no scheme can be met"
    return f"{text}: take another number of nodes, or of other domains; {other}"


@dataclass(frozen=True)
class RankPlace:
    """Place of one trainer rank, and the bytes that its shard's slot must have.

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
