"""A world over all nodes that measures every pair; smaller ones if that does not start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_ft.cli.doctor.facts import WorldFacts, WorldRank, answers, last_words
from megatron_ft.cli.doctor.pair_meter import Measured, WorldRequest
from megatron_ft.cli.doctor.pair_world import Joined
from megatron_ft.cli.doctor.pairs import (
    Pair,
    all_pairs,
    first_groups,
    judge_pairs,
    merged,
    mixed_groups,
    never_well,
    pair_of,
    second_round,
)
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.launcher import Launcher, Placement
from megatron_ft.launchers.outer_launcher import base_environment
from megatron_ft.supervisor.encoder_world import AUTO, WorldStarter

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
        """What the ranks of one world said, and why it ended if not well."""
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
        """Which mpirun; launchers that can tell have a method ``mpi``."""
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
