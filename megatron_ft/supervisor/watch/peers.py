"""Stragglers of a running job: each window of iterations judged once, each change told once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from megatron_ft.supervisor.watch.board import Heard
from megatron_ft.supervisor.watch.stragglers import Straggler, find_stragglers
from megatron_ft.trainer.watch.iterations import WINDOW, WindowSummary

_DATA_PARALLEL = re.compile(r"dp\d+")


class StragglerFinder:
    """Compares ranks that hold the same part of the model, on data of their own."""

    def __init__(self, percent: float) -> None:
        self._percent = percent
        self._judged: dict[str, int] = {}
        self._slow: dict[str, dict[int, Straggler]] = {}

    @property
    def present(self) -> list[Straggler]:
        """Those of the newest windows."""
        return [one for group in self._slow.values() for one in group.values()]

    def begin_life(self) -> None:
        """Ranks may be on other nodes now, and start at another iteration."""
        self._judged.clear()
        self._slow.clear()

    def look(self, heard: Sequence[Heard]) -> list[str]:
        """What is new, for people."""
        groups: dict[str, list[Heard]] = defaultdict(list)
        for one in heard:
            groups[_DATA_PARALLEL.sub("dp", one.shard)].append(one)
        return [text for name, members in groups.items() for text in self._judge(name, members)]

    def _judge(self, name: str, members: Sequence[Heard]) -> list[str]:
        indices = {one.report.window for one in members}
        if len(indices) != 1 or (index := indices.pop()) <= self._judged.get(name, -1):
            return []
        self._judged[name] = index
        windows = {
            one.report.rank: WindowSummary(index, one.report.own, one.report.spread)
            for one in members
        }
        before = self._slow.get(name, {})
        now = {s.rank: s for s in find_stragglers(windows, self._percent)}
        self._slow[name] = now
        nodes = {one.report.rank: one.node for one in members}
        fresh = [_describe(now[rank], nodes[rank]) for rank in sorted(now.keys() - before.keys())]
        gone = sorted(before.keys() - now.keys())
        return fresh + [f"rank {rank} on {nodes[rank]} is no straggler any more" for rank in gone]


def _describe(slow: Straggler, node: str) -> str:
    first = slow.window * WINDOW
    return (
        f"rank {slow.rank} on {node} is a straggler: in iterations {first} to {first + WINDOW - 1} "
        f"its own part took {1e3 * slow.own:.1f} ms, {100 * slow.excess:.0f} % more than its "
        f"peers' {1e3 * slow.peers:.1f} ms"
    )
