"""Requests to many nodes at once, through some of them; who gives no answer is asked directly.

Heartbeats never go this way: a relay that dies must not look like the death of those below it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from megatron_ft.coordinator.link import SmpLink
from megatron_ft.coordinator.tree import Branch, answers, branches, unreached, wrapped
from megatron_ft.errors import ControlPlaneError
from megatron_ft.smp import messages as m

FAN_OUT = 32
"""Connections that one process asks at a time; a job of so many nodes needs no relay."""

PATIENCE_SECONDS = 2.0
"""For all answers of a branch, which take milliseconds."""

DOUBT_SECONDS = 60.0
"""So long a node is asked directly after it has not answered through its relay."""


class Relays:
    """``fan_out`` and ``patience`` may be changed at any time; ``links`` are the coordinator's."""

    def __init__(self, links: Mapping[str, SmpLink]) -> None:
        self.fan_out = FAN_OUT
        self.patience = PATIENCE_SECONDS
        self._links = links
        self._doubted: dict[str, float] = {}

    def split(self, nodes: list[str]) -> tuple[list[str], tuple[Branch, ...]]:
        """Who is asked directly, and the branches of all others: none if there are so few."""
        now = time.monotonic()
        trusted = [n for n in nodes if n in self._links and self._doubted.get(n, 0.0) <= now]
        tree = branches(trusted, self.fan_out) if len(trusted) > self.fan_out else ()
        relayed = {node for branch in tree if branch.below for node in branch.nodes()}
        return [n for n in nodes if n not in relayed], tuple(b for b in tree if b.below)

    def trust(self, node: str) -> None:
        """A node has an SMP that has done nothing yet."""
        self._doubted.pop(node, None)

    async def ask(
        self, branch: Branch, incarnation: int, requests: Mapping[str, m.Message]
    ) -> AsyncIterator[tuple[str, m.Message | None]]:
        """Each node of the branch and its answer, None if it gave none; all at about once."""
        found = await self._answers(branch, incarnation, requests)
        for node in unreached(branch, found.keys()):
            self._doubted[node] = time.monotonic() + DOUBT_SECONDS
        for node in branch.nodes():
            yield node, found.get(node)

    async def _answers(
        self, branch: Branch, incarnation: int, requests: Mapping[str, m.Message]
    ) -> dict[str, m.Message]:
        links = self._links
        # A node of the branch may have been given up since it was drawn.
        with suppress(ControlPlaneError, KeyError):
            endpoints = {node: links[node].endpoint for node in branch.nodes()}
            request = wrapped(branch, incarnation, requests, endpoints, self.patience)
            passed = await links[branch.node].ask(request, self.patience)
            return answers(passed) if isinstance(passed, m.Passed) else {}
        return {}
