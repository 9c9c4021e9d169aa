"""Reads the cost of a loss from ``megatron-ft status --json``, as its documentation says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_ORDER = ("", "disk", "memory")


def said_of(lost: Collection[str], exposure: Mapping[str, Any]) -> tuple[int, str]:
    """Iteration and source that one node, or two, fall back to: -1 and "" for nothing."""
    for group in exposure["pairs"]:
        nodes, others = set(lost) & set(group["nodes"]), set(lost) & set(group["others"])
        if (nodes and others and nodes != others) if group["others"] else len(nodes) == 2:
            return group["iteration"], group["source"]
    alone = [(one["iteration"], one["source"]) for one in map(exposure["nodes"].get, lost) if one]
    return min(alone, key=lambda one: (_ORDER.index(one[1]), one[0]))
