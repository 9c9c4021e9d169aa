"""Copies of bytes: all of them, nothing else, from wherever the tensor is by now."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.trainer import cpu
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.cpu import PlainCopy, copy_all

NUMBERS = torch.arange(5000, dtype=torch.int32).view(torch.uint8)


@given(st.integers(1, 9_000), st.integers(0, 99), st.integers(0, 99))
def test_every_byte_arrives_and_no_other_is_touched(length: int, skip: int, start: int) -> None:
    source = NUMBERS[skip : skip + length]
    memory = torch.full((length + 200,), 7, dtype=torch.uint8)
    copy_all([PlainCopy.of(memory[start : start + length], source)])
    expected = torch.full((length + 200,), 7, dtype=torch.uint8)
    expected[start : start + length] = source
    assert torch.equal(memory, expected)


def test_bits_are_not_read_as_numbers() -> None:
    """Such as the payload of a signalling NaN, or the sign of a zero."""
    source = torch.tensor([0x7FA12345, -0x80000000, 0x7F800001], dtype=torch.int32)
    target = torch.zeros(3)
    copy_all([PlainCopy.of(target, source.view(torch.float32))])
    assert torch.equal(target.view(torch.int32), source)


@pytest.mark.parametrize(("numel", "module", "name"), [(70_000, np, "positive"), (9, cpu, "move")])
def test_memory_that_is_given_back_under_a_copy_is_there_to_its_end(
    numel: int, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a fence that gave up: reading it would be the end of the trainer."""
    memory = np.ones(numel, np.float32)
    source, target = torch.from_numpy(memory), torch.zeros(numel)
    there, seen = weakref.ref(memory), list[bool]()
    del memory
    reads = getattr(module, name)

    def held_up(*words: Any, **more: Any) -> None:
        source.data = torch.zeros(numel)
        gc.collect()
        seen.append(there() is not None)
        reads(*words, **more)

    batch = cpu.SerialBatch.of([CopyItem(source, target)])
    with monkeypatch.context() as patch:
        patch.setattr(module, name, held_up)
        batch.move()
    assert seen == [True]
    assert there() is None, "it is kept for longer than it is read"


def test_a_tensor_that_has_no_memory_is_not_read() -> None:
    source, target = torch.ones(70_000), torch.ones(70_000)
    copies = [PlainCopy.of(target, source)]
    source.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="other memory"):
        copy_all(copies)
    assert target.all()


def test_a_tensor_that_has_other_memory_by_now_is_not_read() -> None:
    """Its old memory may be another's."""
    source, target = torch.ones(70_000), torch.zeros(70_000)
    copy = PlainCopy.of(target, source)
    source.data = torch.full((70_000,), 2.0)
    with pytest.raises(ValueError, match="other memory"):
        copy_all([copy])
    assert not target.any()
