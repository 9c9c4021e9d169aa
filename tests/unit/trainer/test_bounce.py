"""Restores by way of buffers, on a recorded device: nothing unverified leaves for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.digest import BlockCheck
from megatron_ft.core.errors import CorruptBlockError
from megatron_ft.trainer import bounce, restore
from megatron_ft.trainer.bounce import BouncedCopy, DeviceStream, cut_for_buffers, flat_bytes
from megatron_ft.trainer.copier import CopyItem
from tests.support.captures import BLOCK as ARENA_BLOCK
from tests.support.captures import FakeSmp, make_manager
from tests.support.copies import each_way
from tests.unit.trainer.test_capture_cuda import HERE, OnDevice, RecordedCuda
from tests.unit.trainer.test_capture_threads import BLOCK, sealed

lengths = st.lists(st.integers(0, 9_000), max_size=8)


class LateDevice(DeviceStream):
    """A device that makes its copies when somebody waits for them, no earlier."""

    def __init__(self, cuda: RecordedCuda) -> None:
        super().__init__(HERE, cuda)
        self.queued = list[tuple[Any, list[CopyItem]]]()
        self.buffers = 0

    def buffer(self, length: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(length, dtype=torch.uint8)

    def copy(self, items: Any) -> Any:
        device = self

        class Done:
            def synchronize(self) -> None:
                for number, (event, _) in enumerate(device.queued):
                    if event is self:
                        device.make(number)
                        return

        done = Done()
        self.queued.append((done, list(items)))
        return done

    def make(self, number: int) -> None:
        for source, target in self.queued.pop(number)[1]:
            target.copy_(source)

    def finish(self) -> None:
        while self.queued:
            self.make(0)


@pytest.mark.usefixtures(each_way.__name__)
@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 99), st.integers(1, 3_000), st.integers(1, 4), st.data())
def test_what_leaves_was_verified_and_all_else_is_named(
    cut: list[int], padding: int, unit: int, threads: int, data: st.DataObject
) -> None:
    """Though the device reads a buffer as late as it may."""
    contents = [bytes([1 + n % 100]) * length for n, length in enumerate(cut)]
    region, record, starts = sealed(contents, padding)
    places = st.integers(0, max(0, min(record.tensor_bytes, record.digest_offset) - 1))
    flipped = data.draw(st.sets(places, max_size=3)) if record.tensor_bytes else set()
    for at in flipped:
        region[at] ^= 128
    targets = [torch.zeros(length, dtype=torch.uint8) for length in cut]
    device = LateDevice(RecordedCuda())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounce, "UNIT_BYTES", unit)
        cuts = cut_for_buffers(starts, targets, record.tensor_bytes, BLOCK)
        copying = BouncedCopy(BlockCheck(region, record, BLOCK), cuts, targets, device)
        bad = copying.run(threads)
    assert bad == sorted({at // BLOCK for at in flipped})
    assert device.buffers <= bounce.BUFFERS * threads
    spoilt = {
        block for chunk in cuts.chunks for block in cuts.blocks_of(chunk)
        if {*bad} & {*cuts.blocks_of(chunk)}
    }  # fmt: skip
    for content, target, start in zip(contents, targets, starts, strict=True):
        for at, byte in enumerate(content):
            assert target[at] == (0 if (start + at) // BLOCK in spoilt else byte)


def test_copies_run_on_a_stream_that_is_awaited_with_all_that_came_before() -> None:
    cuda = RecordedCuda()
    device = DeviceStream(HERE, cuda)
    source, target = torch.arange(9.0), torch.zeros(9)
    device.copy([CopyItem(source, target)]).synchronize()
    device.finish()
    assert [call[0] for call in cuda.calls] == [
        "synchronize", "enter", "record", "leave", "wait", "drain",
    ]  # fmt: skip
    assert torch.equal(source, target)


def test_page_locked_memory_that_is_refused_is_said_and_done_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.empty

    def refused(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*size, **more)

    monkeypatch.setattr(torch, "empty", refused)
    device = DeviceStream(HERE, RecordedCuda())
    assert [device.buffer(100).nbytes, device.buffer(100).nbytes] == [100, 100]
    assert caplog.text.count("ulimit -l") == 1


def test_a_copy_that_fails_leaves_nothing_under_way() -> None:
    cuda = RecordedCuda()
    region, record, starts = sealed([bytes(5000)], 0)
    targets = [torch.zeros(5000, dtype=torch.uint8)]

    class Failing(DeviceStream):
        def copy(self, items: Any) -> Any:
            raise RuntimeError("launch failed")

        def buffer(self, length: int) -> torch.Tensor:
            return torch.empty(length, dtype=torch.uint8)

    cuts = cut_for_buffers(starts, targets, record.tensor_bytes, BLOCK)
    copying = BouncedCopy(BlockCheck(region, record, BLOCK), cuts, targets, Failing(HERE, cuda))
    with pytest.raises(RuntimeError, match="launch failed"):
        copying.run(3)
    assert cuda.calls[-1] == ("drain", "side")


def device_state() -> dict[str, Any]:
    """Tensors on the device, of several forms, and one of the host."""
    return {
        "w": torch.rand(300_000).as_subclass(OnDevice),
        "half": torch.rand(5).half().as_subclass(OnDevice),
        "scalar": torch.tensor(3.0).as_subclass(OnDevice),
        "strided": torch.rand(30, 20).t().as_subclass(OnDevice),
        "host": torch.rand(70_000),
        "flag": torch.tensor([True, False]).as_subclass(OnDevice),
    }


@pytest.fixture
def captured(tmp_path: Path) -> tuple[FakeSmp, dict[str, Any]]:
    """A snapshot of the state, as host tensors."""
    smp, state = FakeSmp(tmp_path), device_state()
    manager = make_manager(smp)
    manager.prepare({name: tensor.as_subclass(torch.Tensor) for name, tensor in state.items()})
    smp.grant(1)
    manager.save(1, {name: tensor.as_subclass(torch.Tensor) for name, tensor in state.items()})
    smp.wait_ended()
    manager.close()
    smp.offer_last()
    return smp, state


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    """The device; a tensor says that it is on it, whatever its memory is."""
    cuda = RecordedCuda()
    monkeypatch.setattr(bounce, "DeviceStream", partial(DeviceStream, cuda=cuda))
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    on_host = restore.is_plain_memory
    monkeypatch.setattr(restore, "is_plain_memory", lambda t: not t.is_cuda and on_host(t))
    monkeypatch.setattr(restore.PlainLayout, "table", lambda layout, live: None)
    return cuda


def test_a_state_on_a_device_is_restored_bit_by_bit(
    captured: tuple[FakeSmp, dict[str, Any]], seen: RecordedCuda
) -> None:
    smp, state = captured
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert make_manager(smp).load(into=fresh) == 1
    assert all(torch.equal(fresh[name], state[name]) for name in state)
    assert ("enter", "side") in seen.calls


def test_no_byte_of_a_bad_block_reaches_the_device(
    captured: tuple[FakeSmp, dict[str, Any]], seen: RecordedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp, state = captured
    assert smp.arena is not None
    region = smp.arena.data(0, writable=True)
    victim = int(np.flatnonzero(region)[100_000])
    region[victim] ^= 4
    monkeypatch.setattr(bounce, "UNIT_BYTES", ARENA_BLOCK)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.raises(CorruptBlockError, match=f"\\({victim // ARENA_BLOCK}\\)"):
        make_manager(smp).load(into=fresh)
    wrong = 0
    for name, tensor in state.items():
        if tensor.is_contiguous():
            new, old = flat_bytes(fresh[name]), flat_bytes(tensor)
            wrong += int(((new != old) & (new != 0)).sum())
    assert wrong == 0
