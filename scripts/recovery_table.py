#!/usr/bin/env python3
"""Print what each way to continue without a spare is expected to cost, for some scenarios.

scripts/recovery_table.py          # the table of docs/how-to/launchers.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ft.core.identity import HOLD, SHRINK
from megatron_ft.supervisor.recovery_cost import (
    DRAIN,
    GROW,
    HOST,
    LEFT,
    QUEUE,
    REQUEUE,
    SPARE,
    START,
    Figures,
    alternatives,
    cheapest,
)

SHOWN = (SHRINK, HOLD, REQUEUE)
USUAL = Figures(
    nodes=64, lost=1, spares=0, fewer=63, grows=True, hold_limit=600.0, redone=0.0, refused={},
    seconds={
        SPARE: 60.0, SHRINK: 90.0, GROW: 90.0, DRAIN: 60.0, QUEUE: 3600.0, START: 120.0,
        HOST: 1800.0, LEFT: 86400.0,
    },
)  # fmt: skip
SCENARIOS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, float]]] = {
    "as above": ({}, {}),
    "a host in 1 min": ({}, {HOST: 60.0}),
    "48 nodes will do, not more": ({"fewer": 48}, {}),
    "48 nodes will do, not more; a host in 1 min": ({"fewer": 48}, {HOST: 60.0}),
    "no smaller number will do": ({"refused": {SHRINK: "no number"}}, {}),
    "no smaller number will do; 2 min in the queue": (
        {"refused": {SHRINK: "no number"}}, {QUEUE: 120.0},
    ),
    "hosts come only if asked for": ({"grows": False}, {}),
    "hosts come only if asked for; 2 min in the queue": ({"grows": False}, {QUEUE: 120.0}),
    "hosts come only if asked for; 2 min in the queue, 10 min left": (
        {"grows": False}, {QUEUE: 120.0, LEFT: 600.0},
    ),
    "4 nodes, one lost, 2 will do; a host in 2 min": ({"nodes": 4, "fewer": 2}, {HOST: 120.0}),
}  # fmt: skip


def main() -> None:
    """Print a table in Markdown."""
    print(f"| scenario | {' | '.join(SHOWN)} | chosen |")
    print(f"| --- |{' ---: |' * len(SHOWN)} --- |")
    for name, (changes, seconds) in SCENARIOS.items():
        ways = alternatives(replace(USUAL, **changes, seconds={**USUAL.seconds, **seconds}))
        best = cheapest(ways)
        cells = [
            "-" if way.why_not else f"{way.node_seconds:,.0f}" for way in ways if way.way in SHOWN
        ]
        print(f"| {name} | {' | '.join(cells)} | {'-' if best is None else best.way} |")


if __name__ == "__main__":
    main()
