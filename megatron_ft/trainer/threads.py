"""How many threads one rank may use while no training runs."""

from __future__ import annotations

import os

MOST = 4
"""More do not move bytes faster: memory is the limit."""


def spare_threads(environment: dict[str, str] | None = None) -> int:
    """This rank's share of the cores that it may run on, at least 1, at most MOST.

    LOCAL_WORLD_SIZE says how many ranks share them, as torchrun sets it.
    """
    variables = os.environ if environment is None else environment
    text = variables.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(text) if text.isdigit() else 1
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // max(1, ranks)))
