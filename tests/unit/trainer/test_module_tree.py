"""A tree gives what torch's three walks would, whatever was done to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ft.trainer.module_tree import ModuleTree, has_extra_state


class Keeping(nn.Linear):
    """Keeps a number beside its weights."""

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        """Nothing depends on it."""


class Renaming(nn.Linear):
    """Calls its weights by names of its own."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"my_{name}", found) for name, found in super().named_parameters(*args, **kwargs))


class Block(nn.Module):
    """Parameters of its own and of two modules, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.first, self.neighbour, self.second = nn.Linear(2, 2), nn.Identity(), nn.BatchNorm1d(2)
        self.register_buffer("count", torch.zeros(1))


def made() -> nn.Module:
    return nn.Sequential(Block(), nn.Identity(), Block())


def seen(tree: ModuleTree) -> list[list[tuple[str, int]]]:
    """All that it gives, objects by identity."""
    return [
        [(name, id(found)) for name, found in part]
        for part in (tree.keeping, tree.parameters.items(), tree.buffers.items())
    ]


def walked(model: nn.Module) -> list[list[tuple[str, int]]]:
    """The same by torch's own calls."""
    modules = list(model.named_modules())
    keeping = [named for named in modules if has_extra_state(named[1])]
    parts = (keeping, model.named_parameters(), model.named_buffers())
    return [[(name, id(found)) for name, found in part] for part in parts]


Edit = Callable[[Any], None]


def _replace_dict(model: Any) -> None:
    model[0]._parameters = {**model[0]._parameters, "scale": nn.Parameter(torch.ones(2))}


def _move_to_neighbour(model: Any) -> None:
    """The same keys and values in the same order, in another module."""
    first, neighbour = model[0].first, model[0].neighbour
    first._parameters, neighbour._parameters = {}, first._parameters


EDITS: dict[str, Edit] = {
    "parameter replaced": lambda m: setattr(m[0], "scale", nn.Parameter(torch.ones(2))),
    "parameter of equal value": lambda m: setattr(m[0], "scale", nn.Parameter(m[0].scale.detach())),
    "parameter added": lambda m: m[2].first.register_parameter("more", nn.Parameter(torch.ones(1))),
    "parameter taken out": lambda m: m[2].first.register_parameter("bias", None),
    "parameter tied": lambda m: setattr(m[2].first, "weight", m[0].first.weight),
    "buffer replaced": lambda m: setattr(m[0], "count", m[0].count + 1),
    "buffer added": lambda m: m[1].register_buffer("table", torch.ones(3)),
    "buffer taken out": lambda m: m[2]._buffers.pop("count", None),
    "module replaced": lambda m: setattr(m[0], "first", nn.Linear(2, 2)),
    "module that keeps something": lambda m: setattr(m[2], "first", Keeping(2, 2)),
    "module of other names": lambda m: setattr(m[2], "first", Renaming(2, 2)),
    "module added": lambda m: m.append(Block()),
    "module added in a leaf": lambda m: m[1].add_module("adapter", nn.Linear(1, 1)),
    "modules in another order": lambda m: m._modules.update({"0": m._modules.pop("0")}),
    "module renamed": lambda m: m[0]._modules.update({"third": m[0]._modules.pop("first", None)}),
    "dict replaced": _replace_dict,
    "parameters moved": _move_to_neighbour,
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("name", EDITS)
def test_what_changed_is_seen(name: str) -> None:
    model = made()
    tree = ModuleTree(lambda: [model])
    tree.refresh()
    EDITS[name](model)
    tree.refresh()
    assert seen(tree) == walked(model)


@given(st.lists(st.sampled_from(sorted(EDITS)), max_size=6))
def test_what_changed_again_and_again_is_seen(names: list[str]) -> None:
    model = made()
    tree = ModuleTree(lambda: [model])
    for name in names:
        try:
            EDITS[name](model)
        except (AttributeError, KeyError, TypeError):
            continue  # what it edits is gone by then
        tree.refresh()
        assert seen(tree) == walked(model)


def test_another_root_is_seen_and_roots_are_named_by_number() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    tree = ModuleTree(lambda: chunks, lambda number, name: f"chunk{number}.{name}")
    tree.refresh()
    assert list(tree.parameters) == [
        f"chunk{number}.{name}" for number in (0, 1) for name in ("weight", "bias")
    ]
    chunks[1] = nn.Linear(2, 2, bias=False)
    tree.refresh()
    assert tree.parameters["chunk1.weight"] is chunks[1].weight
    assert "chunk1.bias" not in tree.parameters
    chunks.append(nn.Linear(2, 2))
    tree.refresh()
    assert "chunk2.bias" in tree.parameters


@pytest.mark.parametrize("odd", [Renaming(2, 2), torch.jit.script(nn.Linear(2, 2))])
@pytest.mark.parametrize("wrapped", [True, False])
def test_modules_with_walks_of_their_own_are_asked(odd: nn.Module, wrapped: bool) -> None:
    model = nn.Sequential(odd) if wrapped else odd
    tree = ModuleTree(lambda: [model])
    tree.refresh()
    assert [name for name, _ in model.named_parameters()] == list(tree.parameters)


def test_a_module_that_hides_itself_is_asked() -> None:
    model = made()
    hidden: Any = model[0].first
    hidden.named_modules = lambda *_, **__: iter(())
    tree = ModuleTree(lambda: [model])
    tree.refresh()
    assert seen(tree) == walked(model)
    del hidden.named_modules
    tree.refresh()
    assert seen(tree) == walked(model)


def test_what_is_forgotten_is_let_go() -> None:
    model = made()
    tree = ModuleTree(lambda: [model])
    tree.refresh()
    tree.forget()
    assert seen(tree) == [[], [], []]
    tree.refresh()
    assert seen(tree) == walked(model)
