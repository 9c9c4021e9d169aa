"""Networks that can be cut, for chaos jobs on machines that can have them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

MODULE = "megatron_ft.cli.chaos.node_network"


def missing() -> str:
    """Why no job can have a network of its own here; empty if it can."""
    try:
        return str(import_module(MODULE).unavailable())
    except ModuleNotFoundError:
        return "this release has no networks that can be cut"


def network_of(job: str, nodes: Sequence[str]) -> Any:
    """The job's network, which every process of it and its runner name alike."""
    return import_module(MODULE).NodeNetwork(job, nodes)
