"""Seats: the nodes that train, those that may take over, and those that must not.  Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import (
    Domains,
    check_domains,
    crowded,
    domain_of,
    members_of,
    possible_scheme,
    stripe_sets,
)
from megatron_ft.supervisor.job_state import JobRecord
from megatron_ft.supervisor.spec import JobSpec

Stripes = Sequence[Collection[int]]
"""The stripes of a job, each as positions of nodes."""


@dataclass(frozen=True)
class Seats:
    """The nodes of one job; methods give the next value.

    ``active`` train, by position, which is the order of their ranks: a spare gets the position of
    the node that it replaces, so that no other shard moves.  ``leaving`` must not train: their
    ranks move to spares with the next incarnation.  ``last_resort`` are those of them that train
    before the job stops for lack of a spare, ``moving`` the one whose memory is not elsewhere yet.
    ``aside`` have no room for their part.
    """

    spec: JobSpec
    active: tuple[str, ...]
    leaving: frozenset[str] = frozenset()
    last_resort: frozenset[str] = frozenset()
    moving: frozenset[str] = frozenset()
    aside: frozenset[str] = frozenset()

    @classmethod
    def noted(cls, spec: JobSpec, record: JobRecord, nodes: Sequence[str]) -> Seats:
        """Those in a job's notes; at its first start the first of ``nodes`` train."""
        active = record.active or tuple(first_active(spec, nodes))
        return cls(spec, active, frozenset(record.evacuated), frozenset(record.avoided))

    @property
    def ranks(self) -> int:
        """Number of trainer ranks; it falls when the job shrinks."""
        return len(self.active) * self.spec.ranks_per_node

    @property
    def scheme(self) -> Scheme:
        """The scheme of new stripes: the one asked for, or the nearest for fewer nodes."""
        spec = self.spec
        return scheme_over(self.active, spec.nodes, spec.domains, spec.scheme)

    @property
    def evacuated(self) -> frozenset[str]:
        """Nodes that do not train any more and are no spares."""
        return self.leaving - {*self.active}

    def usable(self, there: Iterable[str]) -> list[str]:
        """The nodes that are there, but those that were set aside or evacuated."""
        away = self.aside | self.evacuated
        return [node for node in there if node not in away]

    def free(self, there: Iterable[str]) -> list[str]:
        """Nodes that are there and could take the place of another one."""
        used = {*self.active, *self.aside, *self.leaving}
        return [node for node in there if node not in used]

    def lost(self, there: Iterable[str]) -> list[str]:
        usable = self.usable(there)
        return [node for node in self.active if node not in usable]

    def holders(self, there: Iterable[str]) -> set[str]:
        """Nodes that shards of an older layout are read from: not the one that is leaving."""
        return set(there) - self.aside - (self.moving - {*self.active})

    def substitutes(self, there: Collection[str]) -> list[str]:
        """The nodes that take places of lost ones, the best first.

        If spares are too few, also a node whose move was cut short, and those of last resort.
        """
        spares = [node for node in self.usable(there) if node not in self.active]
        if len(spares) < len(self.lost(there)):
            more = [node for node in there if node in self.moving | self.last_resort]
            spares += [node for node in more if node not in self.active]
        return spares

    def replacements(
        self, lost: Sequence[str], spares: Sequence[str], stripes: Stripes
    ) -> dict[str, str]:
        """The spare for each lost node, and for those that shall leave as far as there are some."""
        replaced = nodes_to_replace(self.active, lost, self.leaving, len(spares))
        domains, most = self.spec.domains, self.spec.scheme.parity_members
        return choose_spares(self.active, replaced, spares, stripes, domains, most)

    def crowded(self, stripes: Stripes) -> list[tuple[str, list[str]]]:
        """Failure domains that have more nodes in a stripe than it can lose, with these nodes."""
        most = self.spec.scheme.parity_members
        nodes = [[self.active[i] for i in stripe] for stripe in stripes if most]
        return list(crowded(nodes, self.spec.domains, most))

    def replaced(self, chosen: Mapping[str, str]) -> Seats:
        """With these nodes replaced; one that trains again is not leaving any more."""
        active = tuple(chosen.get(node, node) for node in self.active)
        return replace(self, active=active, leaving=self.leaving - {*active})

    def train_on(self, nodes: Sequence[str]) -> Seats:
        return replace(self, active=tuple(nodes))

    def evacuate(self, node: str) -> Seats:
        """``node`` gives its position to a spare, if there is one.

        Until ``moved`` it takes its position back if the spare is lost.
        """
        return replace(self.exclude(node), moving=frozenset({node}))

    def take_back(self, node: str) -> Seats:
        last_resort, leaving = self.last_resort - {node}, self.leaving - {node}
        return replace(self, leaving=leaving, last_resort=last_resort, moving=frozenset())

    def exclude(self, node: str, *, last_resort: bool = False) -> Seats:
        """As ``evacuate``, from memory as it is; with ``last_resort`` before no spare is left."""
        resort = self.last_resort - {node} | ({node} if last_resort else set())
        return replace(self, leaving=self.leaving | {node}, last_resort=resort)

    def moved(self) -> Seats:
        """Note that the shards of evacuated nodes are elsewhere."""
        return replace(self, moving=frozenset())

    def set_aside(self, node: str) -> Seats:
        """``node`` has no room: the next incarnation gives its position to another spare."""
        return replace(self, aside=self.aside | {node})


def choose_active(nodes: Sequence[str], count: int, domains: Domains, scheme: Scheme) -> list[str]:
    """The ``count`` nodes that train, in the given order; the others are spares.

    The first ones if stripes can be made of them, else those that leave the fewest nodes in
    any one failure domain: if any choice allows stripes, this one does.
    """
    active = list(nodes[:count])
    largest = max(map(len, members_of(active, domains).values()), default=0)
    if not scheme.parity_members or stripe_sets(len(active), largest, scheme) is not None:
        return active
    active = list(nodes)
    while len(active) > count:
        crowd = max(members_of(active, domains).values(), key=len)
        active.remove(crowd[-1])
    return active


def scheme_over(nodes: Sequence[str], asked: int, domains: Domains, wanted: Scheme) -> Scheme:
    """The scheme of stripes over ``nodes``: ``wanted``, or the nearest for fewer than ``asked``."""
    if len(nodes) >= asked or not wanted.parity_members:
        return wanted
    largest = max(map(len, members_of(nodes, domains).values()))
    return possible_scheme(len(nodes), largest, wanted) or wanted


def nodes_to_replace(
    active: Sequence[str], lost: Collection[str], leaving: Collection[str], spares: int
) -> list[str]:
    """The nodes that train whose places spares take: the lost ones, then those that shall leave.

    A node that shall leave still trains, so it stays where there is no spare for it.
    """
    gone = [node for node in active if node in lost]
    wanted = [node for node in active if node in leaving and node not in lost]
    return [*gone, *wanted[: max(0, spares - len(gone))]]


def first_active(spec: JobSpec, there: Sequence[str], before: Sequence[str] = ()) -> list[str]:
    """The nodes of ``there`` that train first; ProtectionError if their stripes break the rule.

    Nodes that trained ``before`` are preferred.
    """
    known = [node for node in before if node in there]
    nodes = list(dict.fromkeys((*known, *there)))
    active = choose_active(nodes, spec.nodes, spec.domains, spec.scheme)
    check_domains(active, spec.domains, spec.scheme)
    return active


def other_size(spec: JobSpec, record: JobRecord, nodes: Sequence[str]) -> bool:
    """True if a job is kept with other nodes or ranks than asked for, so that it is reshaped.

    ``nodes`` are those that can be reached.  One that has shrunk is asked for with the number that
    it began with.  ConfigError if more of its nodes are out of reach than parity makes up for.
    """
    kept = len(record.active)
    shrunk = kept < spec.nodes == record.nodes
    ranks = (kept if shrunk else spec.nodes) * spec.ranks_per_node
    if not kept or ((kept == spec.nodes or shrunk) and len(record.shards) in (0, ranks)):
        return False
    away = [node for node in record.active if node not in nodes]
    if record.committed and record.shards and len(away) > spec.scheme.parity_members:
        raise ConfigError(
            f"job {spec.name!r} is kept with {kept} nodes; you asked for {spec.nodes} with "
            f"{spec.spares} spares, which leaves the memory of {', '.join(away)} out of reach. Use "
            f"--nodes {kept}, give --spares {kept - spec.nodes} for the others to be read, or free "
            f"the memory: `megatron-ft clean --job {spec.name}`"
        )
    return True


MOST_TRIED = 10_000
"""Choices of domains that are compared at most."""


def choose_spares(
    active: Sequence[str],
    lost: Sequence[str],
    spares: Sequence[str],
    stripes: Sequence[Collection[int]],
    domains: Domains,
    most: int,
) -> dict[str, str]:
    """The spare that takes the place of each lost node.

    ``stripes`` are sets of positions in ``active``.  As few stripes as can be hold more than
    ``most`` nodes of one failure domain afterwards; then as many lost nodes as can be are
    replaced from their own domain; then the order of ``spares`` counts.  There must be
    enough spares.
    """

    def cost(word: Sequence[str]) -> tuple[int, int]:
        moved = dict(zip(lost, word, strict=True))
        names = [moved.get(node, domain_of(node, domains)) for node in active]
        counts = [Counter(names[i] for i in stripe) for stripe in stripes]
        excess = sum(max(0, n - most) for count in counts for n in count.values())
        return excess, sum(name != domain_of(node, domains) for node, name in moved.items())

    # Spares of one domain are alike, so a choice is a word of domains.
    free = Counter(domain_of(spare, domains) for spare in spares)
    best = min(itertools.islice(_words(free, len(lost)), MOST_TRIED), key=cost)
    queues = {domain: iter(names) for domain, names in members_of(spares, domains).items()}
    return {node: next(queues[domain]) for node, domain in zip(lost, best, strict=True)}


def _words(free: Counter[str], length: int) -> Iterator[tuple[str, ...]]:
    """Every word of this many domains, none more often than it is ``free``."""
    if not length:
        yield ()
        return
    for domain in [one for one in free if free[one]]:
        free[domain] -= 1
        for rest in _words(free, length - 1):
            yield (domain, *rest)
        free[domain] += 1


def stripes_by_position(
    members: Collection[Sequence[str]], positions: Mapping[str, int]
) -> list[frozenset[int]]:
    """Positions of the nodes of each stripe, from the shards of its members; each set once.

    Shards whose position is not known are left out.
    """
    sets = {frozenset(positions[s] for s in stripe if s in positions) for stripe in members}
    return sorted(sets, key=sorted)
