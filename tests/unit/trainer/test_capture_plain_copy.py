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

from megatron_ft.core import copy_crc
from megatron_ft.core.copy_crc import CopyCrc
from megatron_ft.trainer import cpu
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.cpu import SerialBatch
from tests.support.copies import each_way

pytestmark = pytest.mark.usefixtures(each_way.__name__)

NUMBERS = torch.arange(5000, dtype=torch.int32).view(torch.uint8)


@given(st.integers(1, 9_000), st.integers(0, 99), st.integers(0, 99))
def test_every_byte_arrives_and_no_other_is_touched(length: int, skip: int, start: int) -> None:
    source = NUMBERS[skip : skip + length]
    memory = torch.full((length + 200,), 7, dtype=torch.uint8)
    SerialBatch([CopyItem(source, memory[start : start + length])], 0).move()
    expected = torch.full((length + 200,), 7, dtype=torch.uint8)
    expected[start : start + length] = source
    assert torch.equal(memory, expected)


def test_bits_are_not_read_as_numbers() -> None:
    """Such as the payload of a signalling NaN, or the sign of a zero."""
    source = torch.tensor([0x7FA12345, -0x80000000, 0x7F800001], dtype=torch.int32)
    target = torch.zeros(3)
    SerialBatch([CopyItem(source.view(torch.float32), target)], 0).move()
    assert torch.equal(target.view(torch.int32), source)


@pytest.mark.parametrize("numel", [70_000, 9])
def test_memory_that_is_given_back_under_a_copy_is_there_to_its_end(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a fence that gave up: reading it would be the end of the trainer."""
    by_numpy = (np, "positive") if numel > cpu.SERIAL_ELEMENTS else (cpu, "move")
    module, name = by_numpy if copy_crc.load() is None else (CopyCrc, "stream")
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

    batch = SerialBatch([CopyItem(source, target)])
    with monkeypatch.context() as patch:
        patch.setattr(module, name, held_up)
        batch.move()
    assert seen == [True]
    assert there() is None, "it is kept for longer than it is read"


def test_a_tensor_that_has_no_memory_is_not_read() -> None:
    source, target = torch.ones(70_000), torch.ones(70_000)
    copies = SerialBatch([CopyItem(source, target)])
    source.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="other memory"):
        copies.move()
    assert target.all()


def test_a_tensor_that_has_other_memory_by_now_is_not_read() -> None:
    """Its old memory may be another's."""
    source, target = torch.ones(70_000), torch.zeros(70_000)
    copies = SerialBatch([CopyItem(source, target)])
    source.data = torch.full((70_000,), 2.0)
    with pytest.raises(ValueError, match="other memory"):
        copies.move()
    assert not target.any()
