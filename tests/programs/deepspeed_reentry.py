"""A rank that trains with DeepSpeed many times in one process, and prints what it computes.

Run by tests/unit/trainer/test_teardown.py: ``train`` with a cell of the tests' matrix as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from tests.programs.deepspeed_program import make_engine, train_step
from tests.support.reentries import ENTRIES, Reentries

STEPS = 3


def train() -> None:
    import deepspeed_ext  # noqa: F401

    cell = json.loads(sys.argv[1])
    Reentries(int(os.environ[ENTRIES])).run(lambda: once(cell))


def once(cell: dict[str, Any]) -> None:
    """Train some steps, and leave everything as it is then."""
    engine = make_engine(cell)
    losses = [float(loss).hex() for _ in range(STEPS) for loss in train_step(engine)]
    # A rank in a new process has to name modules and parameters as one that enters again.
    named = [*engine.module.modules(), *engine.module.parameters()]
    print("losses", *losses, *(getattr(one, "ds_id", "") for one in named), flush=True)
    torch.distributed.barrier()
