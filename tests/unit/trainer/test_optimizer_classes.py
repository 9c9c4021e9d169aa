"""Registered optimizers: what is made before the first step is what that step would make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import megatron_ft
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer import optimizer_classes
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.master_tensors import create_missing
from megatron_ft.trainer.optimizer_classes import optimizer_class, sharding_of
from tests.support.captures import bits

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}, {"fused": True}],
    "AdamW": [{"foreach": True}],
    "Muon": [{"nesterov": False}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
}


def registered() -> Iterator[tuple[str, dict[str, Any]]]:
    """The optimizers of torch that are, with options under which they keep other state."""
    for cls in optimizer_classes._known:
        if not isinstance(cls, str) and cls.__module__.startswith("torch."):
            for options in [{}, *OPTIONS.get(cls.__name__, [])]:
                yield cls.__name__, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), list(registered()), ids=str)
def test_state_that_is_made_ahead_is_what_the_first_step_makes(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    seen = []
    for ahead in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype))
        optimizer = getattr(torch.optim, name)([parameter], **options)
        if ahead:
            create_missing(optimizer)
            made = {key: (v.dtype, v.shape) for key, v in optimizer.state[parameter].items()}
        for number in range(3):
            # Zeros of both signs, which a moment must not turn around.
            drawn = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            parameter.grad = (drawn * torch.tensor([1, 0.0, -0.0, 1])).to(dtype)
            optimizer.step()
        state = optimizer.state[parameter]
        seen.append((bits(parameter), {key: (v.dtype, bits(v)) for key, v in state.items()}))
    assert seen[0] == seen[1]
    assert made == {key: (v.dtype, v.shape) for key, v in state.items()}
    known = optimizer_class(optimizer).state
    assert state.keys() <= known.keys()
    for key, value in state.items():
        way = "elementwise" if value.shape == parameter.shape else "scalar"
        assert sharding_of(optimizer, key) == way


class Own(torch.optim.Optimizer):
    """Nobody knows it until it is registered."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


class Sub(Own):
    """Is known by its parent."""


@pytest.fixture
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_classes, "_known", dict(optimizer_classes._known))


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("cls", [Own, "Own"])
def test_a_class_of_ones_own_is_known_once_it_is_registered(cls: Any) -> None:
    optimizer = Sub([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ConfigError, match=r"call megatron_ft.register_optimizer\(Sub, create="):
        create_missing(optimizer)
    megatron_ft.register_optimizer(
        cls,
        create=lambda inner, group, parameter: {
            "momentum": torch.zeros_like(parameter),
            "norm": torch.zeros(2),
            "errors": torch.zeros(5),
        },
        state={"momentum": "elementwise", "norm": "replicated", "errors": "local"},
    )
    state = MappingState({"optimizer": optimizer})
    state.expect_reshape()
    assert {name.rpartition("/")[2] for name in state.boundary_tensors() | state.tensors()} == {
        "momentum",
        "norm",
        "errors",
    }
    assert sharding_of(optimizer, "norm") == "replicated"
    assert sharding_of(optimizer, "else") == "local"


@pytest.mark.usefixtures("nothing_stays")
def test_what_is_kept_beside_the_registered_names_is_refused_by_name() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    create_missing(optimizer)
    optimizer.state[parameter]["curvature"] = torch.ones(3)
    with pytest.raises(ConfigError, match=r"keeps 'curvature' \(Tensor\).*register_optimizer"):
        optimizer_classes.check_state(optimizer, optimizer.state[parameter])


def test_a_registration_that_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="state gives sharded, of which only elementwise, scalar"):
        megatron_ft.register_optimizer(Own, create=dict, state={"m": "sharded"})
    with pytest.raises(ConfigError, match="create is not a function"):
        megatron_ft.register_optimizer(Own, create=None, state={})
