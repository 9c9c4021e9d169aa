"""What ranks of tests of calls run: how many a save makes in the training thread."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_ext.state import EngineState
from deepspeed_ext.state_parts import RandomStates
from tests.programs.deepspeed_program import make_engine
from tests.support.calls import calls_of
from tests.support.captures import FakeSmp, make_manager
from tests.support.deepspeed_cells import Cell, zero

FEW = 32
"""Layers of the smaller model."""

MOST_CALLS, MOST_C_CALLS = 6, 10
"""Of a save, for each master and its three tensors."""

LAYER_CALLS, LAYER_C_CALLS = 18, 36
"""For two modules, and the two parameters of each: the model is walked at each save."""


class Layers(nn.Module):
    """Layers of a trained and a frozen part.

    Of buffers there is one: they are copied in the training thread, each by itself.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.trained = nn.ModuleList(nn.LayerNorm(8) for _ in range(count))
        self.frozen = nn.ModuleList(nn.LayerNorm(8) for _ in range(count)).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))


def layers(options: dict[str, Any]) -> dict[str, Any]:
    model = Layers(**options)
    trained = [p for p in model.parameters() if p.requires_grad]
    return {"model": model, "model_parameters": trained}


def calls_of_save(stage: int, count: int) -> Counter[str]:
    """Of one behind others, which looks at nothing that it has not seen."""
    cell = Cell(
        "case",
        0,
        zero(stage, "fp32"),
        "tests.programs.deepspeed_calls_cases:layers",
        {"count": count},
    )
    engine = make_engine(dataclasses.asdict(cell))
    smp = FakeSmp(Path(sys.argv[1], str(count), str(torch.distributed.get_rank())))
    smp.directory.mkdir(parents=True)
    manager, state = make_manager(smp), EngineState(engine, {"random": RandomStates()})
    with manager.fence():
        manager.prepare(state)
    for iteration in (1, 2, 3):
        smp.grant(iteration)
        found = calls_of(lambda at=iteration: manager.save(at, state))  # type: ignore[misc]
        smp.wait_ended()
        assert len(smp.sealed_records) == iteration, smp.abandoned_ids
    manager.close()
    engine.destroy()
    return found


def a_save_makes_few_calls_for_more_tensors() -> None:
    """So many a layer; for each master what it takes to find what is kept for it."""
    stage = int(sys.argv[2])
    few, many = (calls_of_save(stage, count) for count in (FEW, 2 * FEW))
    masters = 2 * FEW if stage == 0 else 0  # more of them: with ZeRO one of a group's parameters
    assert many["call"] - few["call"] <= FEW * LAYER_CALLS + masters * MOST_CALLS, (few, many)
    most = FEW * LAYER_C_CALLS + masters * MOST_C_CALLS
    assert many["c_call"] - few["c_call"] <= most, (few, many)
    torch.distributed.destroy_process_group()
