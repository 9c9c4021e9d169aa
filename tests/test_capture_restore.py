"""Restores of tensors that lie in memory as no plan would put them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_capture_support import FakeSmp, bits, make_manager

from megatron_ft.capture.fill import PIECE_BYTES


@pytest.fixture
def smp(tmp_path: Path) -> Iterator[FakeSmp]:
    """An SMP without an arena yet."""
    fake = FakeSmp(tmp_path)
    yield fake
    if fake.arena is not None:
        fake.arena.close()


def saved(smp: FakeSmp, state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The bits of a state, after they were captured."""
    manager = make_manager(smp)
    manager.prepare(state)
    smp.grant(1)
    manager.save(1, state)
    smp.wait_ended()
    manager.close()
    smp.offer_last()
    return {name: bits(tensor) for name, tensor in state.items()}


def test_a_large_tensor_that_is_not_contiguous_is_loaded_in_place(smp: FakeSmp) -> None:
    columns = PIECE_BYTES // 4 // 1000 + 1
    wanted = saved(smp, {"turned": torch.randn(1000, columns).t()})
    fresh = {"turned": torch.zeros(1000, columns).t()}
    address = fresh["turned"].data_ptr()
    make_manager(smp).load(into=fresh)
    assert bits(fresh["turned"]) == wanted["turned"]
    assert fresh["turned"].data_ptr() == address and not fresh["turned"].is_contiguous()
