"""Measures every pair of nodes in one world, and names the node that is slow or broken.

A slow node is slow with every partner, a good one is fast with some.  So a node is judged by its
best pair, and one that is suspected is measured again with partners that are not.  Where the world
of all nodes does not start, smaller ones find out which node is in its way.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

import msgspec

from megatron_ft.cli.doctor.facts import WorldFacts, WorldRank, answers, last_words
from megatron_ft.cli.doctor.pair_world import Joined, Measured, WorldRequest
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.launcher import Launcher, Placement
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.supervisor.encoder_world import AUTO, WorldStarter

SLOW_NODE = 0.5
"""A node whose best pair has less than this share of the typical best pair is slow."""

SLOW_ON_ONE_MACHINE = 0.2
"""The same where nodes share a machine: there they take each other's time."""

SLOW_LINK = 0.25
"""A pair of nodes that are not slow, with less than this share of the typical rate, is slow."""

REPEATS = 3
"""Measurements of a pair in the second round; the best counts."""

PARTNERS = 16
"""Most trusted partners with which a suspect is measured again."""

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


START_SECONDS = 60.0

Said = Joined | Measured


class Worlds:
    """Starts worlds of ``pair_world`` over nodes of ``launcher``; logs go to ``folder``.

    ``transport`` is the one that the user wants, as for WorldStarter.
    """

    def __init__(self, launcher: Launcher, folder: Path, token: str, transport: str = AUTO) -> None:
        self._launcher, self._folder, self._token = launcher, folder, token
        self._starter = WorldStarter(launcher, transport)
        self._count = 0

    async def examine(self, nodes: Sequence[str], one_machine: bool) -> WorldFacts:
        """Measure every pair of nodes; suspects once more with other partners.

        Where the world of all does not start, worlds of two find out who is in its way.
        """
        said, error = await self._world(nodes, WorldRequest(self._token))
        joined = {s.node: s.rank for s in said if isinstance(s, Joined)}
        if len(joined) < len(nodes):
            return await self._find_broken(nodes, error)
        rates = dict.fromkeys(all_pairs(nodes), 0.0) | rates_of(nodes, said)
        verdict = judge_pairs(nodes, rates, one_machine)
        rounds = second_round(nodes, verdict)
        if rounds:
            said, _ = await self._world(nodes, WorldRequest(self._token, rounds))
            rates = merged(rates, rates_of(nodes, said), verdict.suspects)
        return self._facts(joined, rates)

    async def _find_broken(self, nodes: Sequence[str], error: str) -> WorldFacts:
        groups = first_groups(nodes)
        # A group of all has just failed.
        first = {g: len(g) < len(nodes) and await self._starts(g) for g in groups}
        mixed = [(group, await self._starts(group)) for group in mixed_groups(first)]
        broken = never_well([*first.items(), *mixed])
        return self._facts({}, {}, broken, error or "ranks did not join")

    def _facts(
        self,
        joined: dict[str, WorldRank],
        rates: dict[Pair, float],
        broken: tuple[str, ...] = (),
        error: str = "",
    ) -> WorldFacts:
        tcp, no_mpi = self._starter.over_tcp, self._starter.no_mpi
        return WorldFacts(joined, rates, self._launcher_name(), broken, error, tcp, no_mpi)

    async def _starts(self, nodes: Sequence[str]) -> bool:
        said, _ = await self._world(nodes, WorldRequest(self._token, exchanges=1))
        sizes = [s.size for s in said if isinstance(s, Joined)]
        silent = any(isinstance(s, Measured) and not s.rate for s in said)
        return sizes == [len(nodes)] * len(nodes) and not silent

    async def _world(self, nodes: Sequence[str], request: WorldRequest) -> tuple[list[Said], str]:
        """Answers of the ranks of one world, and the reason if it ended badly."""
        self._count += 1
        log = self._folder / f"world{self._count}.log"
        text = msgspec.json.encode(request).decode()
        argv = [sys.executable, "-m", "megatron_ft.cli.doctor.pair_world", text]
        environment = {**base_environment(), "OMP_NUM_THREADS": "1"}
        limit = START_SECONDS + max(len(nodes), len(request.rounds)) * request.pair_seconds
        try:
            placements = [Placement(node, argv, environment) for node in nodes]
            world = await asyncio.to_thread(self._starter.start, placements, log)
        except MegatronFTError as error:
            return [], str(error)
        error_text = ""
        try:
            status = await asyncio.wait_for(world.wait(), limit)
            error_text = "" if status == 0 else f"status {status}: {last_words(log)}"
        except asyncio.TimeoutError:
            error_text = f"no end within {limit:.0f} s: {last_words(log)}"
        finally:
            world.kill()
            await world.wait()
        return list(answers(log, Said)), error_text  # type: ignore[arg-type]

    def _launcher_name(self) -> str:
        """The mpirun in use; launchers that know it have a method ``mpi``."""
        found = getattr(self._launcher, "mpi", None)
        if found is None or self._starter.over_tcp:
            return ""
        try:
            mpi = found()
        except MegatronFTError:
            return ""
        return f"{mpi.kind.value} {mpi.version} ({mpi.path})"


def rates_of(nodes: Sequence[str], said: Sequence[Said]) -> dict[Pair, float]:
    """The best rate of each pair, where both ranks had an answer; else 0."""
    heard: dict[Pair, dict[int, float]] = {}
    for s in said:
        if isinstance(s, Measured):
            by_rank = heard.setdefault(pair_of(nodes[s.rank], nodes[s.partner]), {})
            by_rank[s.rank] = max(s.rate, by_rank.get(s.rank, 0.0))
    return {pair: min(by.values()) if len(by) == 2 else 0.0 for pair, by in heard.items()}
