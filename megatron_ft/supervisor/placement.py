"""Placement: the nodes that train, the spares that take over, and their failure domains.

Failure domains come from a file of lines ``rack1: node[0-3],node7``.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import (
    Domains,
    check_domains,
    domain_of,
    members_of,
    possible_scheme,
    stripe_sets,
)
from megatron_ft.supervisor.job_state import JobRecord
from megatron_ft.supervisor.spec import JobSpec


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
    """Every word of so many domains, none more often than it is ``free``."""
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


_ENTRY = re.compile(r"([^\s:=]+)\s*:\s*(\S.*)")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_MOST_NAMES = 1 << 16


def read_domains(source: str, nodes: Sequence[str]) -> dict[str, str]:
    """Failure domain of each of ``nodes``, from a file.

    ConfigError for a file that cannot be read or understood, or that does not name a node.
    """
    try:
        found = parse_domains(Path(source).read_text(), source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--failure-domains {source} cannot be read: {error}") from error
    missing = [node for node in nodes if node not in found]
    if missing:
        raise ConfigError(
            f"{source} puts {', '.join(missing)} in no failure domain; it names "
            f"{', '.join(sorted(found)[:8]) or 'no node'}. Add them, each in a domain of its own "
            "if it shares nothing with another"
        )
    return {node: found[node] for node in nodes}


def parse_domains(text: str, where: str) -> dict[str, str]:
    """Failure domain by node.  Pure; ConfigError, which names the line, for what is no such file.

    ``#`` begins a comment.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line, place = raw.partition("#")[0].strip(), f"{where}, line {number}"
        if not line:
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise ConfigError(
                f"{place}: {line!r} is no failure domain; write `rack1: node[0-3],node7`"
            )
        name, nodes = entry.groups()
        for node in expand_hostlist(re.sub(r"\s*,\s*", ",", nodes), place):
            if found.setdefault(node, name) != name:
                raise ConfigError(
                    f"{place}: {node} is in failure domain {name} and in {found[node]}; "
                    "a node is in one"
                )
    return found


def expand_hostlist(expression: str, place: str = "hostlist") -> list[str]:
    """Host names of ``n[0-3,07],m1``: ranges keep their leading zeros.  Pure.

    ConfigError, which begins with ``place``, for brackets or ranges that make no sense.
    """
    return [name for part in _split(expression, place) for name in _expand(part, place)]


def _split(expression: str, place: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", expression)
    if ",".join(parts) != expression or not parts:
        raise ConfigError(f"{place}: {expression!r} is no list of nodes; write node[0-3],node7")
    return parts


def _expand(part: str, place: str) -> Iterable[str]:
    pieces = _BRACKET.split(part)
    # Odd pieces were in brackets.
    choices = [_range(p, place) if i % 2 else [p] for i, p in enumerate(pieces)]
    names = ["".join(names) for names in itertools.islice(itertools.product(*choices), _MOST_NAMES)]
    return [name.strip() for name in names]


def _range(text: str, place: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        first, last = (match.group(1), match.group(2) or match.group(1)) if match else ("", "")
        if not first or not 0 <= int(last) - int(first) < _MOST_NAMES:
            raise ConfigError(f"{place}: [{text}] is no range of numbers; write [0-3,7]")
        found += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return found
