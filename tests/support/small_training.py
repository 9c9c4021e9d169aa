"""A small training with all kinds of state, for the tests of captures in one process."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ft.trainer.state import RngState
from tests.support.captures import bits


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def make_training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(), torch.nn.Linear(32, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "rng": RngState(),
        "progress": {"tokens": 0, "seen": []},
        "iteration": 0,
    }


def advance(state: dict[str, Any], iteration: int) -> None:
    train_step(state["model"], state["optimizer"])
    state["schedule"].step()
    state["progress"]["tokens"] += 32
    state["progress"]["seen"].append(iteration)
    state["iteration"] = iteration


def fingerprint(state: dict[str, Any]) -> list[Any]:
    weights = {k: bits(v) for k, v in state["model"].state_dict().items()}
    moments = {
        (i, k): bits(v)
        for i, s in state["optimizer"].state_dict()["state"].items()
        for k, v in s.items()
    }
    groups = [{k: v for k, v in g.items()} for g in state["optimizer"].param_groups]
    for group in groups:
        group.pop("params")
    schedule = state["schedule"].state_dict()
    counters = (state["progress"], state["iteration"], torch.get_rng_state().tolist())
    return [weights, moments, groups, schedule, counters]
