"""Which nodes train and which take over: decisions about failure domains.  Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.domains import Domains, domain_of, members_of, stripe_sets

MOST_TRIED = 10_000


def choose_active(nodes: Sequence[str], count: int, domains: Domains, scheme: Scheme) -> list[str]:
    """The ``count`` nodes that train, in the given order; the others are spares.

    The first ones if stripes can be made of them, else those that leave the fewest nodes in
    any one failure domain: if any choice allows stripes, this one does.
    """
    active = list(nodes[:count])
    if not scheme.parity_members or _fits(active, domains, scheme):
        return active
    active = list(nodes)
    while len(active) > count:
        largest = max(members_of(active, domains).values(), key=len)
        active.remove(largest[-1])
    return active


def choose_spares(
    active: Sequence[str],
    lost: Sequence[str],
    spares: Sequence[str],
    stripes: Sequence[Collection[int]],
    domains: Domains,
    most: int,
) -> dict[str, str]:
    """Which spare takes the place of each lost node.

    ``stripes`` are sets of positions in ``active``.  As few stripes as can be hold more than
    ``most`` nodes of one failure domain afterwards; then as many lost nodes as can be are
    replaced from their own domain; then the order of ``spares`` counts.  There must be
    enough spares.
    """
    assert len(spares) >= len(lost), "the caller has counted the spares"
    # Spares of one domain are as good as each other, so only domains are tried.
    waiting = members_of(spares, domains)
    words = itertools.islice(_words(waiting, len(lost)), MOST_TRIED)
    best = min(words, key=lambda word: _cost(word, active, lost, stripes, domains, most))
    queues = {name: iter(nodes) for name, nodes in waiting.items()}
    return {node: next(queues[name]) for node, name in zip(lost, best, strict=True)}


def stripes_by_position(
    members: Collection[Sequence[str]], positions: Mapping[str, int]
) -> list[frozenset[int]]:
    """Positions of the nodes of each stripe, from the shards of its members; each set once.

    Shards whose position is not known are left out.
    """
    sets = {frozenset(positions[s] for s in stripe if s in positions) for stripe in members}
    return sorted(sets, key=sorted)


def describe_domains(
    active: Sequence[str], nodes: Sequence[str], domains: Domains, scheme: Scheme
) -> str:
    """The failure domains of a job and what becomes of its stripes, in one line."""
    groups = members_of(active, domains)
    shown = "; ".join(f"{name}: {', '.join(found)}" for name, found in groups.items())
    spares = [f"{n} ({domain_of(n, domains)})" for n in nodes if n not in active]
    text = f"{len(groups)} failure domains train ({shown})"
    text += f", spares {', '.join(spares)}" if spares else ", no spares"
    count = stripe_sets(len(active), max(map(len, groups.values())), scheme)
    if not scheme.parity_members or count is None:
        return text
    lengths = sorted({len(active) // count, -(-len(active) // count)})
    return (
        f"{text}; stripes of {' or '.join(map(str, lengths))} nodes, at most "
        f"{scheme.parity_members} of one domain in each"
    )


def _fits(active: Sequence[str], domains: Domains, scheme: Scheme) -> bool:
    largest = max(map(len, members_of(active, domains).values()))
    return stripe_sets(len(active), largest, scheme) is not None


def _words(waiting: Mapping[str, Sequence[str]], length: int) -> Iterator[tuple[str, ...]]:
    """Every sequence of domains that the waiting spares can serve."""
    for word in itertools.product(waiting, repeat=length):
        if all(count <= len(waiting[name]) for name, count in Counter(word).items()):
            yield word


def _cost(
    word: Sequence[str],
    active: Sequence[str],
    lost: Sequence[str],
    stripes: Sequence[Collection[int]],
    domains: Domains,
    most: int,
) -> tuple[int, int]:
    """Nodes too many of one domain over all stripes, and lost nodes replaced from elsewhere."""
    moved = dict(zip(lost, word, strict=True))
    names = [moved.get(node, domain_of(node, domains)) for node in active]
    excess = sum(
        count - most
        for stripe in stripes
        for count in Counter(names[i] for i in stripe).values()
        if count > most
    )
    return excess, sum(name != domain_of(node, domains) for node, name in moved.items())
