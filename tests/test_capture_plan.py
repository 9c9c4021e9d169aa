"""What a plan leaves whole, and what it lets nobody else own."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ft.capture.mapping import MappingState
from megatron_ft.capture.plan import plan_state


def test_what_cannot_be_cut_or_may_differ_is_not_split() -> None:
    """A part of it would be a copy, or forward may change it on one rank alone."""
    state: dict[str, Any] = {
        "turned": torch.zeros(100, 200).t(),
        "changing": torch.zeros(100, 200),
    }
    group = object()
    replicated = {"turned": group, "changing": group}
    adapted = MappingState(state, replicated=replicated, boundary=["changing"])
    # Even who is in the group is not asked.
    layout = plan_state(adapted, split_bytes=1)
    assert [entry.parts for entry in layout.entries] == [1, 1]


def test_what_forward_may_change_is_never_left_to_a_tensor_that_is_copied_later() -> None:
    memory = torch.zeros(4000)
    state = {"lazy": memory, "part": memory[1000:3000]}
    changing = plan_state(MappingState(state, boundary=["part"]), split_bytes=1 << 30)
    assert [entry.alias_of for entry in changing.entries] == ["", ""]
    still = plan_state(MappingState(state), split_bytes=1 << 30)
    assert [entry.alias_of for entry in still.entries] == ["", "lazy"]
