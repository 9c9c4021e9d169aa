"""The state of an optimizer among the small objects comes back, whatever it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.state import RngState
from tests.support.calls import calls_of_save

State = dict[str, Any]


class Recording(torch.optim.AdamW):
    """Notes what it is given to load."""

    given: State

    def load_state_dict(self, content: State) -> None:
        self.given = content


def step(state: State) -> None:
    for group in state["optimizer"].param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def of_layers(count: int, kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> State:
    """A usual training of so many layers."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(count)))
    optimizer = kind(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": RngState()}
    step(state)
    return state


Kept = list[dict[Any, Any]]
"""What an optimizer keeps of each parameter, in their order."""


def rename(kept: Kept) -> None:
    kept[0]["renamed"] = kept[0].pop("exp_avg")


def turn(kept: Kept) -> None:
    """All keys and tensors stay, and their order; only whose one of them is changes."""
    following = {"own": torch.ones(2), **kept[1]}
    kept[1].clear()
    kept[1].update(following)


EDITS: dict[str, Callable[[Kept], object]] = {
    "tensors alone": lambda kept: None,
    "a number beside them": lambda kept: kept[1].update(note=3),
    "nothing in the place of one": lambda kept: kept[1].update(exp_avg=None),
    "a text": lambda kept: kept[0].update(note="text"),
    "a tensor in a dict": lambda kept: kept[2].update(note={"tensor": torch.ones(2)}),
    "another tensor of equal value": lambda kept: kept[0].update(step=kept[0]["step"].clone()),
    "one tensor of two": lambda kept: kept[0].update(exp_avg=kept[1]["exp_avg"]),
    "a key that is no text": lambda kept: kept[0].update({7: torch.ones(2)}),
    "another name": rename,
    "another key of the next": turn,
    "one less": lambda kept: kept[1].pop("step"),
    "nothing of one": lambda kept: kept[1].clear(),
}


def same(one: Any, other: Any) -> bool:
    """Equal in types, order and values, and of tensors the very same."""
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and [*one] == [*other]
            and all(map(same, one.values(), other.values()))
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


@pytest.mark.parametrize("name", EDITS)
def test_what_an_optimizer_keeps_comes_back(name: str) -> None:
    state = of_layers(2, Recording)
    adapted = MappingState(state)
    adapted.objects()
    EDITS[name]([*state["optimizer"].state.values()])
    adapted.refresh()
    adapted.load(adapted.objects())
    assert same(state["optimizer"].given, state["optimizer"].state_dict())


def regroup(groups: Kept) -> None:
    """A parameter changes its group; the order of all stays."""
    groups[0]["params"].append(groups[1]["params"].pop(0))


def swap_rates(groups: Kept) -> None:
    groups[0].update(lr=groups[0]["eps"], eps=groups[0]["lr"])


GROUP_EDITS: dict[str, Callable[[Kept], object]] = {
    "a rate": lambda groups: groups[1].update(lr=groups[1]["lr"] / 2),
    "a tensor for a rate": lambda groups: groups[0].update(lr=torch.tensor(0.5)),
    "two rates of tensors": lambda groups: groups[0].update(betas=(torch.ones(1), torch.ones(1))),
    "two tensors swapped": swap_rates,
    "a list filled in place": lambda groups: groups[0]["noted"].append(len(groups[0]["noted"])),
    "a rate in a dict": lambda groups: groups[0].update(more={"rate": torch.ones(1)}),
    "a new rate": lambda groups: groups[1].update(note="text"),
    "another group of a parameter": regroup,
}


@pytest.mark.parametrize("name", GROUP_EDITS)
def test_what_groups_hold_comes_back(name: str) -> None:
    model = of_layers(2)["model"]
    groups = [{"params": list(layer.parameters()), "noted": []} for layer in model]
    groups[0].update(lr=torch.tensor(0.1), eps=torch.tensor(0.2), foreach=False)
    state = {"optimizer": Recording(groups)}
    step(state)
    adapted = MappingState(state)
    for _ in range(2):
        adapted.refresh()
        adapted.objects()
        GROUP_EDITS[name](state["optimizer"].param_groups)
    adapted.refresh()
    adapted.load(adapted.objects())
    assert same(state["optimizer"].given, state["optimizer"].state_dict())


@pytest.mark.parametrize("key", [7, "text"])
def test_what_it_keeps_of_no_parameter_and_twice_comes_back(key: Any) -> None:
    state = of_layers(2, Recording)
    kept = state["optimizer"].state
    first, second, *_ = kept
    kept[key], kept[second] = {"tensor": torch.ones(2)}, kept[first]
    adapted = MappingState(state)
    adapted.load(adapted.objects())
    given = state["optimizer"].given
    assert same(given, state["optimizer"].state_dict())
    assert given["state"][0] is given["state"][1]


def test_what_it_kept_before_its_first_step_comes_back() -> None:
    state = {"optimizer": Recording([torch.nn.Parameter(torch.ones(3))])}
    adapted = MappingState(state)
    adapted.load(adapted.objects())
    assert same(state["optimizer"].given, state["optimizer"].state_dict())


class Fragile:
    """Something whose state cannot be had at times."""

    broken = False

    def state_dict(self) -> State:
        if self.broken:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, content: State) -> None:
        pass


def test_a_mapping_is_looked_at_again_after_an_entry_raised() -> None:
    state = {**of_layers(2), "fragile": Fragile()}
    adapted = MappingState(state)
    adapted.refresh()
    state["fragile"].broken = True
    with pytest.raises(RuntimeError, match="not now"):
        adapted.refresh()
    state["fragile"].broken = False
    state["model"][0].weight = torch.nn.Parameter(torch.ones(3, 3))
    assert adapted.tensors()["model/0.weight"] is state["model"][0].weight


def calls_after_a_step(folder: Path, count: int) -> Counter[str]:
    state = of_layers(count)

    def train() -> None:
        step(state)
        state["schedule"].step()

    return calls_of_save(folder, state, train)


def test_a_save_calls_nothing_for_what_stays(tmp_path: Path) -> None:
    """Modules and optimizers are compared with those of last time in calls that loop in C."""
    few, many = (calls_after_a_step(tmp_path / str(count), count) for count in (2, 100))
    assert many["call"] - few["call"] < 98, (few, many)
    assert many["c_call"] - few["c_call"] < 98, (few, many)
