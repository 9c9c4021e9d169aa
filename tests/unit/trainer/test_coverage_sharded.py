"""FSDP2 and objects around torch's distributed state dicts: their local shards are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.captures import FakeSmp, bits, make_manager, saved

State = dict[str, Any]


@pytest.fixture
def smp(tmp_path: Path) -> Iterator[FakeSmp]:
    made = FakeSmp(tmp_path)
    place = (tmp_path / "store").as_uri()
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield made
    dist.destroy_process_group()
    if made.arena is not None:
        made.arena.close()


class AppState:
    """The wrapper of the tutorial of torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, content: State) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )


class ModelWrapper:
    """That of torchtitan: flat, and only the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> State:
        return dict(get_model_state_dict(self.model))

    def load_state_dict(self, content: State) -> None:
        set_model_state_dict(self.model, content)


class OptimizerWrapper:
    """The other one of torchtitan."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> State:
        return dict(get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, content: State) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, content)


class Counting(nn.Module):
    """A layer with a buffer that no state dict has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)  # type: ignore[operator]
        return torch.tanh(self.linear(data))


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights of more and of fewer bytes than are kept with the small objects."""
    torch.manual_seed(seed)
    model = nn.Sequential(Counting(96), Counting(96))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


FORMS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], State]] = {
    "plain": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "app": lambda model, optimizer: {"app": AppState(model, optimizer)},
    "titan": lambda model, optimizer: {
        "model": ModelWrapper(model),
        "optimizer": OptimizerWrapper(model, optimizer),
    },
    "both": lambda model, optimizer: {"model": model, "app": AppState(model, optimizer)},
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        data = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    tensors += [moment for kept in optimizer.state.values() for moment in kept.values()]
    return [bits(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors]


@pytest.mark.parametrize("form", FORMS)
def test_sharded_training_continues_as_it_was(smp: FakeSmp, form: str) -> None:
    model, optimizer = parts(0)
    train(model, optimizer, range(3))
    saved(smp, FORMS[form](model, optimizer))
    fresh, again = parts(1)
    state = FORMS[form](fresh, again)
    assert make_manager(smp).load(into=state) == 1
    without_buffers = form in ("app", "titan")
    if without_buffers:  # torch's own functions leave them out
        for layer, other in zip(fresh, model, strict=True):  # type: ignore[call-overload]
            layer.seen.copy_(other.seen)
    assert look(fresh, again) == look(model, optimizer)
    train(model, optimizer, range(3, 6))
    train(fresh, again, range(3, 6))
    assert look(fresh, again) == look(model, optimizer)


def test_a_first_load_leaves_an_optimizer_as_it_is(smp: FakeSmp) -> None:
    """get_optimizer_state_dict makes a step with a rate of zero, which Adam counts."""
    model, optimizer = parts(0)
    assert make_manager(smp).load(into=FORMS["app"](model, optimizer)) == 0
    assert not optimizer.state


def test_weights_that_were_gathered_for_an_evaluation_are_captured_as_shards(smp: FakeSmp) -> None:
    """Behind a forward pass alone FSDP2 leaves whole weights in the root."""
    model, optimizer = parts(0)
    train(model, optimizer, range(2))
    saved(smp, FORMS["plain"](model, optimizer))
    with torch.no_grad():
        model(torch.ones(1, 96))
    fresh, again = parts(1)
    train(fresh, again, range(1))
    with torch.no_grad():
        fresh(torch.ones(1, 96))
    assert make_manager(smp).load(into=FORMS["plain"](fresh, again)) == 1
    with torch.no_grad():
        for layer in (*model, *fresh):  # type: ignore[misc]
            layer.seen.zero_()
        model(torch.ones(1, 96))
        fresh(torch.ones(1, 96))
    train(model, optimizer, range(2, 4))
    train(fresh, again, range(2, 4))
    assert look(fresh, again) == look(model, optimizer)
