"""Notes in a job's trace folder which trainers import torch, and when.

The ``sitecustomize`` of this folder does it.  A process that a trainer host has forked has torch
already, and is not noted.  Steps of DeepSpeed take at least PACE_SECONDS there: those of a small
model are over before a fault can strike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.core.startup import before_script

NOTES = "imports.jsonl"
"""File in the trace folder, a line for each import: the process, and monotonic seconds."""

PACE_SECONDS = 0.05


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """``given`` for trainers whose imports of torch are noted."""
    return before_script(given, Path(__file__).parent)


def noted(trace: Path) -> list[float]:
    """Times at which trainers that trace into this folder had imported torch."""
    path = trace / NOTES
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(json.loads(line)["at"]) for line in lines]
