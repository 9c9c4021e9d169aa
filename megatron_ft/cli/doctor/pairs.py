"""Which node is slow or broken, from what pairs of nodes managed together.  Pure.

A slow node is slow with every partner, a good one is fast with some.  So a node is judged
by its best pair, and one that is suspected is measured again with partners that are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_high
from typing import NamedTuple

SLOW_NODE = 0.5
"""A node whose best pair has less than this share of the typical best pair is slow."""

SLOW_ON_ONE_MACHINE = 0.2
"""The same where nodes share a machine: there they take each other's time."""

SLOW_LINK = 0.25
"""A pair of nodes that are not slow, with less than this share of the typical rate, is slow."""

REPEATS = 3
"""How often a pair is measured in the second round; its best counts."""

PARTNERS = 16
"""With how many trusted partners a suspect is measured again, at most."""

Pair = tuple[str, str]
"""Two nodes in alphabetical order."""


class PairVerdict(NamedTuple):
    """Slow nodes with their share of the typical rate, nodes and links without any answer.

    ``typical`` is in bytes a second.  Links are between nodes that are well otherwise.
    """

    typical: float
    slow: Mapping[str, float]
    broken: tuple[str, ...]
    slow_links: Mapping[Pair, float]
    broken_links: tuple[Pair, ...]

    @property
    def suspects(self) -> frozenset[str]:
        """Every node that is named, in a link too."""
        links = {node for pair in (*self.slow_links, *self.broken_links) for node in pair}
        return frozenset(links | {*self.slow, *self.broken})


def pair_of(one: str, other: str) -> Pair:
    """The pair of two nodes."""
    return (one, other) if one < other else (other, one)


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which each of ``count`` meets every other exactly once.

    The circle method: one stays, the others go round; with an odd number one pauses.
    """
    seats = list(range(count + count % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]


def judge_pairs(
    nodes: Sequence[str], rates: Mapping[Pair, float], one_machine: bool = False
) -> PairVerdict:
    """Name nodes and links; a rate of 0 means no answer, pairs that are missing say nothing.

    On ``one_machine`` no link is slow, for there is none.
    Of two nodes alone none can be told from the other: what is wrong is their link.
    """
    best = {n: max((r for p, r in rates.items() if n in p), default=0.0) for n in nodes}
    typical = median_high(best.values()) if best else 0.0
    if len(nodes) == 2 or not typical:
        silent = tuple(pair for pair, value in rates.items() if not value)
        return PairVerdict(typical, {}, (), {}, silent)
    broken = tuple(node for node in nodes if not best[node])
    shares = {node: best[node] / typical for node in nodes}
    least = SLOW_ON_ONE_MACHINE if one_machine else SLOW_NODE
    slow = {n: share for n, share in shares.items() if 0 < share < least}
    well = {p: r for p, r in rates.items() if not {*p} & {*broken, *slow}}
    slow_links = {pair: r / typical for pair, r in well.items() if 0 < r < SLOW_LINK * typical}
    return PairVerdict(
        typical,
        slow,
        broken,
        {} if one_machine else slow_links,
        tuple(pair for pair, r in well.items() if not r),
    )


def second_round(nodes: Sequence[str], verdict: PairVerdict) -> list[list[tuple[int, int]]]:
    """Suspects mixed with other partners, one pair at a time so that none disturbs another.

    Rounds of pairs of positions in ``nodes``; empty if nothing is suspected.  Nodes that
    gave no answer at all are left out.
    """
    suspects = verdict.suspects - {*verdict.broken}
    trusted = [n for n in nodes if n not in verdict.suspects]
    pairs = {pair_of(s, t) for s in suspects for t in trusted[:PARTNERS]}
    pairs |= {*verdict.slow_links, *verdict.broken_links}
    if trusted[1:]:
        # Trusted nodes too, or a rate taken in peace would make theirs of the first round look low.
        calm = trusted[:PARTNERS] if suspects else []
        pairs |= {pair_of(a, b) for a, b in zip(calm, calm[1:], strict=False)}
    else:
        pairs |= set(all_pairs(sorted(suspects)))
    rounds = [[(nodes.index(a), nodes.index(b))] for a, b in sorted(pairs)]
    return rounds * REPEATS


def merged(
    first: Mapping[Pair, float], again: Mapping[Pair, float], suspects: Collection[str]
) -> dict[Pair, float]:
    """Rates of both rounds: for each pair the better, since what disturbed one is not the pair's.

    What the first round said of suspects does not count where the second did not look.
    """
    kept = {p: r for p, r in first.items() if p in again or not {*suspects} & {*p}}
    better = {p: max(r, first.get(p, 0.0)) for p, r in again.items()}
    silent = {p: r for p, r in first.items() if not r}
    return {**silent, **kept, **better}


def all_pairs(nodes: Sequence[str]) -> list[Pair]:
    """Every pair of nodes."""
    return [pair_of(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]


def first_groups(nodes: Sequence[str]) -> list[tuple[str, ...]]:
    """Disjoint worlds of two, the last of three if their number is odd."""
    groups = [tuple(nodes[i : i + 2]) for i in range(0, len(nodes), 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def mixed_groups(groups: Mapping[tuple[str, ...], bool]) -> list[tuple[str, ...]]:
    """Worlds for a second round: each node of one that failed, with one that was well.

    Where none was well, each node alone.
    """
    well = [node for group, ran in groups.items() if ran for node in group]
    failed = [node for group, ran in groups.items() if not ran for node in group]
    if not well:
        return [(node,) for node in failed]
    return [(well[i % len(well)], node) for i, node in enumerate(failed)]


def never_well(groups: Iterable[tuple[Collection[str], bool]]) -> tuple[str, ...]:
    """Nodes of which every world failed."""
    found = list(groups)
    well = {node for group, ran in found if ran for node in group}
    return tuple(sorted({node for group, _ in found for node in group} - well))
