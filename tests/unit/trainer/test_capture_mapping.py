"""What a mapping is taken for when only a name in it, or only a prefix, tells the difference."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from megatron_ft.trainer.mapping import MappingState


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
