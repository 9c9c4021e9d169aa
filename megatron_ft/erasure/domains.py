"""How many nodes of one failure domain meet in a stripe: the rule, and when it can be met.

A stripe survives the loss of any m members, so it survives the loss of a domain if it
holds at most m members of it.  Dealing nodes out domain by domain over c stripes puts at
most ceil(g / c) of a domain's g nodes into one, and no way of dividing does better; so
the rule can be met exactly when some c gives few enough nodes of the largest domain and
stripes that are neither too long nor too short.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_ft.core.errors import ProtectionError
from megatron_ft.core.scheme import Scheme, largest_scheme

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
    """Into how many sets nodes are divided so that no set holds more than m of a domain.

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

    As much parity as wanted or else less; only where that is impossible more.
    """
    parities = [*range(wanted.parity_members, 0, -1), *range(wanted.parity_members + 1, node_count)]
    for parity in parities:
        kind = wanted.kind if wanted.kind != "xor" or parity == 1 else "rs"
        data = 1 if kind == "replica" else min(wanted.data_members, node_count - parity)
        if data < 1:
            continue
        scheme = Scheme(kind, data, parity)
        if stripe_sets(node_count, largest_domain, scheme) is not None:
            return scheme
    return None


def _indivisible(count: int, scheme: Scheme) -> str:
    """What to do where stripes leave nodes over although each is a domain of its own."""
    fewest, most = scheme.parity_members + 1, scheme.members
    sizes = f"{most}" if fewest == most else f"{fewest} to {most}"
    fitting = [n for n in range(most, 2 * count + most) if stripe_sets(n, 1, scheme) is not None]
    numbers = [max(n for n in fitting if n < count), min(n for n in fitting if n > count)]
    # Longer stripes survive as many losses, and cost less memory than more parity.
    kind = "xor" if scheme.kind == "xor" else "rs"
    longer = (
        Scheme(kind, data, scheme.parity_members) for data in range(scheme.data_members + 1, count)
    )
    other = next(found for found in longer if stripe_sets(count, 1, found) is not None)
    return (
        f"{count} nodes cannot be divided into stripes of {scheme}, which have {sizes} nodes: "
        f"train on {numbers[0]}, with the others as spares, or on {numbers[1]}, or take {other}"
    )


def _refusal(nodes: Sequence[str], name: str, largest: Sequence[str], scheme: Scheme) -> str:
    if len(largest) == 1:
        return _indivisible(len(nodes), scheme)
    parity = scheme.parity_members
    needed = max(-(-len(largest) // parity), -(-len(nodes) // scheme.members))
    text = (
        f"failure domain {name} holds {len(largest)} of {len(nodes)} nodes "
        f"({', '.join(largest)}): a stripe of {scheme} survives the loss of {parity}, so they "
        f"need {needed} stripes of {parity + 1} to {scheme.members} nodes, and {len(nodes)} nodes "
        f"make at most {len(nodes) // (parity + 1)}"
    )
    possible = possible_scheme(len(nodes), len(largest), scheme)
    if possible is None:
        return f"{text}. No scheme survives the loss of {name}: take nodes of other domains"
    return f"{text}. Take nodes of other domains, or {possible}, the nearest that can be met"
