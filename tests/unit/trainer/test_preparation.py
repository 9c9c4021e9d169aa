"""What a rank settles at its start: its number, the room in its arena, who copies there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ft.arena import digest
from megatron_ft.core import environment
from megatron_ft.core.errors import ConfigError, NotUnderSupervisorError
from megatron_ft.core.shard import pack_meta
from megatron_ft.trainer import cuda, manager
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.engine import (
    META_SPARE_BYTES,
    PLANNING_BLOCK_BYTES,
    choose_copier,
    required_bytes,
)
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state


@given(st.integers(0, 200_000), st.integers(0, 300_000), st.integers(16, 22))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_objects_may_double_and_grow_by_the_spare_in_blocks_of_any_size(
    elements: int, text: int, shift: int
) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(elements), "text": "x" * text}
    adapted = MappingState(state)
    layout = plan_state(adapted, 1 << 30)
    room = required_bytes(layout, adapted.objects(), b"form")
    meta = len(pack_meta(layout.to_bytes(), adapted.objects(), b"form"))
    assert 1 << shift >= PLANNING_BLOCK_BYTES
    grown = 2 * meta + META_SPARE_BYTES
    assert digest.required_bytes(layout.tensor_bytes, grown, 1 << shift) <= room


def test_what_lies_in_host_memory_is_copied_without_a_device() -> None:
    state = MappingState({"weight": torch.zeros(3)})
    assert type(choose_copier(state)) is CpuCopier


def test_tensors_of_a_device_are_copied_from_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current device is: a program may name its device at each call."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(cuda, "CudaCopier", lambda *words: made.append(words))
    with FakeTensorMode():
        one, two = (torch.zeros(3, device=f"cuda:{number}") for number in (1, 2))
        host = torch.zeros(5)
    choose_copier(MappingState({"host": host, "one": one}))
    assert made == [(1,)]
    with pytest.raises(ConfigError, match="2 devices .one on cuda:1, two on cuda:2.*one rank for"):
        choose_copier(MappingState({"one": one, "two": two}))


def test_a_rank_takes_its_number_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (manager.env_int("RANK", 0), manager.env_int("WORLD_SIZE", 1)) == (7, 1)


def test_without_a_supervisor_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.JOB, raising=False)
    for begin in (lambda: manager.connect(0), lambda: manager.watch(0)):
        with pytest.raises(NotUnderSupervisorError, match="megatron-ft run"):
            begin()
