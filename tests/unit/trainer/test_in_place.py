"""Values that a program holds are made equal to stored ones, and stay the objects that they are."""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft import register_class
from megatron_ft.core.errors import ConfigError, UnencodableError
from megatron_ft.core.objects import decode, encode
from megatron_ft.trainer.in_place import filled
from tests.support.captures import FakeSmp, make_manager, saved


@dataclass
class Progress:
    """As scripts keep it."""

    step: int = 0
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Fixed:
    """Nothing of it can be set."""

    step: int


class Pair(NamedTuple):
    """A tuple of things that can be filled."""

    left: Any
    right: Any


for _kind in (Progress, Fixed, Pair):
    register_class(_kind)


def counted(value: dict[str, int]) -> defaultdict[str, int]:
    return defaultdict(int, value)


KEPT: dict[str, tuple[Any, Any]] = {
    "deque": (deque([1.0], 5), deque([2.0, 3.0], 5)),
    "set": ({1, 2}, {2, 3}),
    "list": ([1], [2, [3]]),
    "list of more": ([1, 2, 3], [4]),
    "dict": ({"a": 1}, {"b": 2}),
    "defaultdict": (counted({"a": 1}), counted({"b": 2})),
    "counter": (Counter("ab"), Counter("abb")),
    "ordered": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "dict in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "bytearray": (bytearray(b"abc"), bytearray(b"de")),
    "array": (np.zeros(3), np.arange(3.0)),
    "dataclass": (Progress(), Progress(3, [1.0])),
    "namespace": (SimpleNamespace(a=1), SimpleNamespace(b=2)),
    "arguments": (argparse.Namespace(a=1), argparse.Namespace(b=2)),
    "inside": ({"a": [deque([1])]}, {"a": [deque([2])]}),
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", KEPT)
def test_what_the_program_holds_is_filled(tmp_path: Path, name: str) -> None:
    here, stored = KEPT[name]
    smp = FakeSmp(tmp_path)
    saved(smp, {"value": stored, "weight": torch.ones(3)})
    state = {"value": here, "weight": torch.zeros(3)}
    make_manager(smp).load(into=state)
    assert state["value"] is here and plain(here) == plain(stored)
    if isinstance(here, dict):
        assert list(here) == list(stored)
    assert smp.arena is not None
    smp.arena.close()


def test_what_lies_inside_is_filled_too() -> None:
    losses, seen, array = deque([1.0]), {1}, np.zeros(2)
    here = {"pair": Pair(losses, [seen]), "progress": Progress(0, [0.0]), "array": [array]}
    inner = here["progress"].losses  # type: ignore[attr-defined]
    stored = {
        "pair": Pair(deque([2.0, 3.0]), [{2}]),
        "progress": Progress(7, [5.0]),
        "array": [np.ones(2)],
    }
    assert filled(here, stored) is here
    assert losses == deque([2.0, 3.0]) and seen == {2} and inner == [5.0]
    assert array.tolist() == [1.0, 1.0] and here["pair"] == stored["pair"]


def test_what_cannot_be_filled_takes_its_place() -> None:
    for old, new in ((1, 2), (Fixed(1), Fixed(2)), ([1], (1,)), (np.zeros(2), np.zeros(3))):
        assert filled(old, new) is new


def test_one_object_in_two_places_stays_one_and_two_stay_two() -> None:
    shared = [1]
    here: dict[str, Any] = {"a": [0], "b": [0]}
    one, two = here["a"], here["b"]
    filled(here, {"a": shared, "b": shared})
    assert here["a"] is here["b"] is one and one == [1] and two == [0]
    here = {"a": one, "b": one}
    filled(here, {"a": [1], "b": [2]})
    assert here == {"a": [1], "b": [2]}


LEAVES = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=2)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=2).map(tuple)
        | st.sets(LEAVES, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES)
def test_any_value_becomes_the_stored_one(old: Any, new: Any) -> None:
    assert filled(old, decode(encode(new))) == new


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(4))


def meta() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Linear(4, 4)


class Keeping(torch.nn.Linear):
    """Has something that a dict of tensors cannot give back."""

    def get_extra_state(self) -> Any:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None:
        """Counts."""


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "lazy": (make_model, r"'bad/1\.weight' has no shape yet.*run one forward pass before load"),
    "lazy alone": (torch.nn.UninitializedBuffer, r"'bad' has no shape yet"),
    "meta": (meta, r"'bad/weight' is on the meta device.*or fill it before"),
    "meta in a list": (lambda: [torch.ones(3, device="meta")], r"'bad/0' is on the meta device"),
    "sparse buffer": (lambda: buffered(torch.eye(3).to_sparse()), r"'bad/odd' is torch.sparse"),
    "expanded buffer": (lambda: buffered(torch.ones(1).expand(9)), r"'bad/odd' is expanded"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        r"'bad' is torch.strided, cpu, torch.quint8: only dense",
    ),
    "optimizer's state dict": (
        lambda: optimizer().state_dict(),
        r"'bad'\] is a state_dict\(\) of an optimizer.*would not change the optimizer itself",
    ),
    "model's state dict": (
        lambda: Keeping(3, 3).state_dict(),
        r"'bad'\] is a state_dict\(\) of a module.*would not change the module itself",
    ),
    "copies of a model's state dict": (
        lambda: copied(torch.nn.Linear(3, 3)),
        r"'bad'\] is a state_dict\(\) of a module.*would not change the module itself",
    ),
    "function": (lambda: deque([len]), r"bad.*builtin_function_or_method.*register_class"),
    "module in a set": (lambda: {torch.nn.Linear(3, 3)}, r"bad.*Linear"),
    "module in a list": (lambda: [torch.nn.Linear(3, 3)], r"bad/0 \(Linear\) has a state_dict"),
}


def buffered(tensor: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_buffer("odd", tensor, persistent=False)
    return model


def copied(model: torch.nn.Module) -> Any:
    content = model.state_dict()
    for name in list(content):
        content[name] = content[name].clone()
    return content


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_held_is_refused_by_the_first_load(tmp_path: Path, name: str) -> None:
    """Nothing is there to be loaded: it would be found at the first failure otherwise."""
    make, said = BAD[name]
    with pytest.raises((ConfigError, UnencodableError), match=said):
        make_manager(FakeSmp(tmp_path)).load(into={"good": torch.ones(3), "bad": make()})


def test_a_mapping_that_is_read_only_holds_what_can_be_filled_alone(tmp_path: Path) -> None:
    manager = make_manager(FakeSmp(tmp_path))
    assert manager.load(into=MappingProxyType({"weight": torch.ones(3), "seen": [1]})) == 0
    with pytest.raises(ConfigError, match=r"'step'\] cannot be set: the state mapping is read"):
        manager.load(into=MappingProxyType({"weight": torch.ones(3), "step": 0}))


def test_a_models_state_dict_that_shows_its_memory_is_filled(tmp_path: Path) -> None:
    smp, model, other = FakeSmp(tmp_path), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    saved(smp, {"model": model.state_dict()})
    make_manager(smp).load(into={"model": other.state_dict()})
    assert torch.equal(other.weight, model.weight)
    assert smp.arena is not None
    smp.arena.close()


def test_a_state_without_any_tensor_comes_back(tmp_path: Path) -> None:
    smp, here = FakeSmp(tmp_path), {"progress": {"step": 0}}
    saved(smp, {"progress": {"step": 5}})
    assert make_manager(smp).load(into=here) == 1 and here == {"progress": {"step": 5}}
    assert smp.arena is not None
    smp.arena.close()


class Marked(torch.Tensor):
    """A subclass with plain memory."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).unfold(0, 4, 2),
        lambda: torch.arange(12.0).as_strided((3, 3), (1, 3), 1),
        lambda: torch.arange(12.0).as_subclass(Marked),
        lambda: torch.nn.Parameter(torch.arange(12.0).as_subclass(Marked)),
    ],
    ids=["windows", "strided", "subclass", "parameter of a subclass"],
)
def test_odd_memory_comes_back_exactly(tmp_path: Path, make: Callable[[], Any]) -> None:
    smp, value, fresh = FakeSmp(tmp_path), make(), make()
    saved(smp, {"odd": value})
    with torch.no_grad():
        fresh.fill_(0)
    make_manager(smp).load(into={"odd": fresh})
    assert torch.equal(fresh, value) and type(fresh) is type(value)
    assert smp.arena is not None
    smp.arena.close()
