"""A layout that is bound once sees every way in which a state may change under it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.trainer.binding import LayoutBinding
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state
from megatron_ft.trainer.state import live_tensors

State = dict[str, torch.Tensor]


def made() -> State:
    torch.manual_seed(1)
    return {"a": torch.rand(40, 40), "b": torch.rand(2000), "c": torch.rand(3)}


def bound(state: State, live_of: Enumerate = live_tensors) -> tuple[MappingState, LayoutBinding]:
    """A binding that has seen the state twice, so that it has cached what it caches."""
    adapted = MappingState(state)
    layout = plan_state(adapted, 1 << 30)
    region = np.zeros(layout.tensor_bytes, np.uint8)
    binding = LayoutBinding(layout, [region])
    for _ in range(2):
        live = live_of(adapted)
        assert mismatch(binding, live) == ""
        items(binding, live)
    return adapted, binding


def items(binding: LayoutBinding, live: Mapping[str, torch.Tensor]) -> list[CopyItem]:
    """What a capture copies: at the boundary, and lazily."""
    now = binding.at_boundary(live, 0)
    return [*now, *itertools.chain(*binding.later(live, binding.bind(live), 0))]


Enumerate = Callable[[MappingState], Mapping[str, torch.Tensor]]


def new_views(adapted: MappingState) -> dict[str, torch.Tensor]:
    """As the adapters of frameworks give them."""
    return {name: tensor.detach() for name, tensor in live_tensors(adapted).items()}


both_ways = pytest.mark.parametrize("live_of", [live_tensors, new_views])


def mismatch(binding: LayoutBinding, live: Mapping[str, torch.Tensor]) -> str:
    """What a capture asks, first in the training thread and then in the copy thread."""
    problem = binding.mismatch(live)
    try:
        return problem or "".join(binding.bind(live).changed())
    except ValueError as error:
        return str(error)


def replaced(state: State) -> None:
    state["b"] = torch.rand(2000)


def moved(state: State) -> None:
    state["b"].data = torch.rand(2000)


def transposed(state: State) -> None:
    state["a"].t_()


def reordered(state: State) -> None:
    state["a"] = state.pop("a")


def shifted(state: State) -> None:
    """The same storage and form, from another element on."""
    state["b"].data = torch.rand(3000)
    state["b"].data = state["b"].data[7:2007]


def trained(state: State) -> None:
    state["b"].requires_grad_(not state["b"].requires_grad)


def moved_and_back(state: State) -> None:
    """As offload_states and reload_states of DeepSpeed do."""
    for name in ("a", "b"):
        state[name].data = state[name].data.clone()
        state[name].data = state[name].data.clone() + 1


CHANGES = [replaced, moved, shifted, transposed, reordered, trained, moved_and_back]


@both_ways
@pytest.mark.parametrize("change", [*CHANGES, lambda state: None])
def test_what_is_copied_is_what_the_state_holds_now(
    change: Callable[[State], None], live_of: Enumerate
) -> None:
    state = made()
    adapted, binding = bound(state, live_of)
    change(state)
    live = live_of(adapted)
    assert mismatch(binding, live) == ""
    copy_all(binding, live)
    names = [entry.name for entry in binding.layout.entries]
    for name in names:
        assert torch.equal(binding._targets[0][name], state[name]), name


def copy_all(binding: LayoutBinding, live: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in items(binding, live):
            target.copy_(source)


@pytest.mark.parametrize("name", ["conj", "_neg_view"])
def test_a_view_of_the_same_memory_with_another_sign_is_another_tensor(name: str) -> None:
    state = {"z": torch.randn(2000, dtype=torch.complex64)}
    _, binding = bound(state, new_views)
    live = {"z": getattr(state["z"], name)()}
    assert mismatch(binding, live) == ""
    copy_all(binding, live)
    assert torch.equal(binding._targets[0]["z"], live["z"])


def test_a_view_of_the_same_memory_with_another_dtype_does_not_fit() -> None:
    state = made()
    adapted, binding = bound(state, new_views)
    live = {**new_views(adapted), "b": state["b"].view(torch.int32)}
    assert "b is now torch.int32" in mismatch(binding, live)


def shrunk(state: State) -> None:
    state["b"].resize_(1000)


def reshaped(state: State) -> None:
    state["b"].resize_(20, 100)


def retyped(state: State) -> None:
    state["b"].data = state["b"].data.view(torch.int32)


def renamed(state: State) -> None:
    state["d"] = state.pop("b")


def renamed_in_place(state: State) -> None:
    state["d"] = state.pop("c")


def removed(state: State) -> None:
    del state["b"]


def added(state: State) -> None:
    state["d"] = torch.rand(2000)


def freed(state: State) -> None:
    state["b"].untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "change", [shrunk, reshaped, retyped, renamed, renamed_in_place, removed, added, freed]
)
@both_ways
def test_what_no_longer_fits_is_said_every_time(
    change: Callable[[State], None], live_of: Enumerate
) -> None:
    state = made()
    adapted, binding = bound(state, live_of)
    change(state)
    for _ in range(2):
        assert mismatch(binding, live_of(adapted))


@both_ways
def test_what_was_forgotten_is_looked_at_anew(live_of: Enumerate) -> None:
    state = made()
    adapted, binding = bound(state, live_of)
    binding.forget()
    moved_and_back(state)
    live = live_of(adapted)
    assert mismatch(binding, live) == ""
    copy_all(binding, live)
    assert torch.equal(binding._targets[0]["b"], state["b"])
    binding.forget()
    removed(state)
    assert mismatch(binding, live_of(adapted)) == "b has gone"


def test_a_copy_that_goes_on_is_told_its_items_though_they_are_forgotten_meanwhile() -> None:
    """As where a fence has waited in vain."""
    state = made()
    adapted, binding = bound(state)

    class Forgotten(dict[int, Any]):
        def __setitem__(self, slot: int, items: Any) -> None:
            super().__setitem__(slot, items)
            binding.forget()

    binding._items = Forgotten()
    copy_all(binding, live_tensors(adapted))
    assert torch.equal(binding._targets[0]["a"], state["a"])


def test_a_freed_tensor_is_not_left_to_the_copy_thread_if_it_is_read_before() -> None:
    """At the boundary: reading it would be the end of the trainer."""
    state = made()
    adapted, binding = bound(state)
    assert list(adapted.boundary_tensors()) == ["c"]
    state["c"].untyped_storage().resize_(0)
    said = binding.mismatch(live_tensors(adapted))  # by itself: pytest would print the tensors
    assert said == "c has no memory any more"


def test_a_freed_tensor_is_found_before_the_copy_thread_reads_it() -> None:
    state = made()
    adapted, binding = bound(state)
    live = live_tensors(adapted)
    assert binding.mismatch(live) == ""
    state["b"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="b has no memory any more"):
        binding.bind(live)


@pytest.mark.parametrize("change", [moved, shifted, transposed, moved_and_back, shrunk, retyped])
def test_what_moves_while_it_is_copied_is_named(change: Callable[[State], None]) -> None:
    state = made()
    adapted, binding = bound(state)
    tensors = binding.bind(live_tensors(adapted))
    assert tensors.changed() == []
    change(state)
    assert tensors.changed() in (["a"], ["b"], ["a", "b"])


def test_items_are_made_once_for_tensors_that_stay() -> None:
    """Copiers keep plans with them."""
    state = made()
    adapted, binding = bound(state)

    def later() -> Any:
        live = live_tensors(adapted)
        return binding.later(live, binding.bind(live), 0)

    first = later()
    assert later() is first
    moved(state)
    assert later() is not first


@pytest.mark.parametrize("names", [["b"], []])
def test_what_is_copied_early_stays_so_in_a_layout_that_is_planned_anew(names: list[str]) -> None:
    """Else each new layout would cost a snapshot again before the change was seen."""
    state = made()
    _, before = bound(state)
    before.hurry(names)
    _, after = bound({**state, "new": torch.rand(2000)})
    after.hurry_like(before)
    assert after.lazy_of(["a", "b", "new"]) == (["a", "new"] if names else [])
    assert after.hurries and after.hurries_all is (not names)
