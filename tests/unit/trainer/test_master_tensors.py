"""What optimizers keep is found as it is now."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.trainer.master_tensors import MasterTensors, Owned, state_numbers, state_tensors


class Optimizer:
    """As inner optimizers are, with a state for each of its parameters, scales of moments, and
    whatever else a class of the user's keeps."""

    def __init__(self, numbers: bool) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        self.state: Any = defaultdict(dict)
        self._scales: Any = {}
        for parameter in self.parameters:
            step: Any = 1 if numbers else torch.tensor(1.0)
            self.state[parameter] = {"step": step, "exp_avg": torch.zeros(3)}
            self._scales[parameter] = {"exp_avg": torch.ones(1)}

    def owned(self) -> list[Owned]:
        return [Owned(f"p{number}", self, p) for number, p in enumerate(self.parameters)]


def expected(optimizers: list[Optimizer], owned: list[Owned]) -> Any:
    """Of each master in turn."""
    tensors, numbers = {}, {}
    for name, inner, parameter in owned:
        kept = {"main": parameter, **state_tensors(inner, parameter)}
        tensors |= {f"{name}.{key}": id(tensor) for key, tensor in kept.items()}
        if found := state_numbers(inner, parameter):
            numbers[name] = found
    return tensors, numbers


def given_by(masters: MasterTensors) -> Any:
    tensors = {name: id(tensor) for name, tensor in masters.tensors().items()}
    return tensors, masters.numbers()


Edit = Callable[[Optimizer], None]


def _first(optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[optimizer.parameters[0]]
    return state


def _swap(optimizer: Optimizer) -> None:
    """All the same objects, for other parameters."""
    first, second = optimizer.parameters[:2]
    state = optimizer.state
    state[first], state[second] = state[second], state[first]


def _reorder(optimizer: Optimizer) -> None:
    """The same states in the same order, of parameters in another one."""
    values = [optimizer.state[parameter] for parameter in optimizer.parameters]
    order = [*optimizer.parameters[1:], optimizer.parameters[0]]
    optimizer.state = dict(zip(order, values, strict=True))


EDITS: dict[str, Edit] = {
    "moment of equal value": lambda o: _first(o).update(exp_avg=_first(o)["exp_avg"].clone()),
    "step of equal value": lambda o: _first(o).update(step=torch.tensor(1.0)),
    "step made a number": lambda o: _first(o).update(step=7),
    "number counted": lambda o: _first(o).update(step=o.state[o.parameters[1]]["step"] + 1),
    "moment added": lambda o: _first(o).update(max_exp_avg_sq=torch.zeros(3)),
    "moment taken out": lambda o: _first(o).pop("exp_avg", None),
    "moment renamed": lambda o: _first(o).update(momentum_buffer=_first(o).pop("exp_avg", None)),
    "moments exchanged": lambda o: _first(o).update(
        exp_avg=o.state[o.parameters[1]].get("exp_avg")
    ),
    "states exchanged": _swap,
    "parameters exchanged": _reorder,
    "state replaced": lambda o: o.state.update({o.parameters[0]: {"exp_avg": torch.zeros(3)}}),
    "all states replaced": lambda o: setattr(
        o, "state", defaultdict(dict, {p: {"step": torch.tensor(2.0)} for p in o.parameters})
    ),
    "scale replaced": lambda o: o._scales[o.parameters[0]].update(exp_avg=torch.ones(1)),
    "scales gone": lambda o: setattr(o, "_scales", {}),
    "another parameter": lambda o: o.state.update({torch.nn.Parameter(torch.ones(1)): {}}),
    "something of all": lambda o: o.state.update({"all": torch.ones(1)}),
    "nothing": lambda o: None,
}


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_what_changed_is_seen(name: str, numbers: bool) -> None:
    optimizers = [Optimizer(numbers), Optimizer(numbers=False)]
    owned = [one for optimizer in optimizers for one in optimizer.owned()]
    masters = MasterTensors(owned, ".", "main")
    masters.tensors()
    EDITS[name](optimizers[0])
    assert given_by(masters) == expected(optimizers, owned)


@given(st.lists(st.sampled_from(sorted(EDITS)), max_size=8), st.booleans())
def test_what_changed_again_and_again_is_seen(names: list[str], numbers: bool) -> None:
    optimizer = Optimizer(numbers)
    masters = MasterTensors(optimizer.owned(), ".", "main")
    for name in names:
        try:
            EDITS[name](optimizer)
        except (AttributeError, KeyError, TypeError):
            continue  # what it edits is gone by then
        assert given_by(masters) == expected([optimizer], optimizer.owned())


def test_tensors_are_given_as_they_are_and_wrappers_as_their_data() -> None:
    class Wrapper(torch.Tensor):
        pass

    optimizer = Optimizer(numbers=False)
    wrapped = torch.zeros(3).as_subclass(Wrapper).requires_grad_()
    optimizer.state[optimizer.parameters[0]]["exp_avg"] = wrapped
    masters = MasterTensors(optimizer.owned(), ".", "main")
    found = masters.tensors()
    assert found["p0.main"] is optimizer.parameters[0]
    assert not found["p0.exp_avg"].requires_grad
    wrapped.data = torch.ones(3).as_subclass(Wrapper)
    assert masters.tensors()["p0.exp_avg"].data_ptr() == wrapped.data_ptr()


def test_nothing_that_is_kept_for_masters_is_held() -> None:
    optimizer = Optimizer(numbers=True)
    masters = MasterTensors(optimizer.owned(), ".", "main")
    masters.tensors()
    moment = weakref.ref(_first(optimizer).pop("exp_avg"))
    assert moment() is None
