"""What a plan leaves whole, lets nobody else own, and what a mapping is taken for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state


class Wrapper(torch.Tensor):
    """Its values are elsewhere, as those of quantized parameters."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} was not expected")


class Flattened(Wrapper):
    """It says which."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


class Sharded(torch.nn.Parameter):
    """A parameter of a framework's own kind, whose memory was given back."""


def freed() -> torch.Tensor:
    parameter = Sharded(torch.zeros(3))
    parameter.untyped_storage().resize_(0)
    return parameter


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.nn.Linear(30, 40).weight


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (fake, "is a FakeTensor, which has a shape and no values: .*; make it outside"),
        (
            lambda: torch.zeros(3, device="meta"),
            "is on the meta device, which has .*; make it outside",
        ),
        (
            lambda: Wrapper(torch.zeros(3)),
            "is a Wrapper, which keeps .*: only dense .*; give its inner",
        ),
        (
            lambda: Flattened(torch.zeros(3)),
            "is a Flattened, which keeps .*; give its inner tensors",
        ),
        (freed, "of shape .* has no memory: its storage was resized to nothing"),
        (lambda: torch.eye(3).to_sparse(), "is torch.sparse_coo, cpu, torch.float32: only dense"),
    ],
    ids=["fake", "meta", "wrapper", "flattened", "freed", "sparse"],
)
def test_what_has_no_plain_memory_is_refused_by_its_name_and_for_its_reason(
    make: Callable[[], torch.Tensor], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^tensor 'model/weight' {said}"):
        plan_state(MappingState({"model/weight": make()}), split_bytes=1 << 30)


class Changing(MappingState):
    """Forward may change the tensor of this name."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in super().tensors().items() if name != "changing"}

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        return {"changing": super().tensors()["changing"]}


def test_what_cannot_be_cut_or_may_differ_is_not_split() -> None:
    """A part of it would be a copy, or forward may change it on one rank alone."""
    state: dict[str, Any] = {"turned": torch.zeros(100, 200).t(), "changing": torch.zeros(100, 200)}
    group = object()
    replicated = {"turned": group, "changing": group}
    adapted = Changing(state, replicated=replicated)
    # Even who is in the group is not asked.
    layout = plan_state(adapted, split_bytes=1)
    assert [entry.parts for entry in layout.entries] == [1, 1]


def test_what_forward_may_change_is_never_left_to_a_tensor_that_is_copied_later() -> None:
    memory = torch.zeros(4000)
    state = {"changing": memory[1000:3000], "lazy": memory}
    changing = plan_state(Changing(state), split_bytes=1 << 30)
    assert [entry.alias_of for entry in changing.entries] == ["", ""]
    still = plan_state(MappingState(state), split_bytes=1 << 30)
    assert [entry.alias_of for entry in still.entries] == ["lazy", ""]


def test_a_tensor_that_was_given_another_name_is_found_under_it() -> None:
    tensor = torch.ones(2000)
    state: dict[str, Any] = {"old": tensor}
    adapted = MappingState(state)
    adapted.refresh()
    assert list(adapted.tensors()) == ["old"]
    state["new"] = state.pop("old")
    adapted.refresh()
    assert list(adapted.tensors()) == ["new"] and adapted.tensors()["new"] is tensor


@pytest.mark.parametrize("prefix", ["model", "model/"])
def test_a_prefix_ends_where_a_part_of_a_name_does(prefix: str) -> None:
    state = {"model": torch.nn.Linear(64, 64), "model2": torch.nn.Linear(64, 64)}
    group = object()
    adapted = MappingState(state, replicated={prefix: group})
    adapted.refresh()
    assert adapted.replicas() == {"model/weight": group, "model/bias": group}
    assert adapted.replica_group("model2/weight") is None


class Copying:
    """An object that makes its own tensors of those that it is handed."""

    def __init__(self, content: dict[str, torch.Tensor]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.content

    def load_state_dict(self, content: dict[str, torch.Tensor]) -> None:
        self.content = {name: tensor.clone() for name, tensor in content.items()}


def test_tensors_that_an_object_has_loaded_are_not_kept_beside() -> None:
    """They are as long as the moments of an optimizer."""
    objects = MappingState({"made": Copying({"moments": torch.ones(10_000)})}).objects()
    fresh = Copying({})
    adapted = MappingState({"made": fresh})
    stored = torch.full((10_000,), 7.0)
    kept = weakref.ref(stored)
    adapted.adopt({"made/moments": stored})
    adapted.load(objects)
    assert torch.equal(fresh.content["moments"], stored)
    del stored
    gc.collect()
    assert kept() is None
