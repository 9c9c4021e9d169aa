"""The order of the CUDA copier's calls, on a recorded device: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.arena.digest import verify_shard
from megatron_ft.trainer import copier as copier_module
from megatron_ft.trainer import cuda as cuda_module
from megatron_ft.trainer.copier import RANGE_BYTES, CopyItem, move, ranges
from megatron_ft.trainer.cuda import CudaCopier
from tests.support.captures import BLOCK, FakeSmp, make_manager
from tests.support.copies import each_way

HERE = 2
"""The third GPU."""


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    number = HERE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return self.number


class Elsewhere(OnDevice):
    """Says that it is on another."""

    number = 3


class Pinned(torch.Tensor):
    """Host memory that a device may write to."""

    def is_pinned(self, *_: Any) -> bool:
        return True


class RecordedEvent:
    """Records what is done with it."""

    def __init__(self, cuda: RecordedCuda, number: int) -> None:
        self.cuda, self.number = cuda, number

    def record(self, stream: RecordedStream) -> None:
        """Note the stream."""
        self.cuda.calls.append(("record", self.number, stream.name))

    def synchronize(self) -> None:
        """Note the wait."""
        self.cuda.calls.append(("wait", self.number))


class RecordedStream:
    """Records what is done with it."""

    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: RecordedEvent) -> None:
        """Note the order that is asked for."""
        self.cuda.calls.append(("stream waits", self.name, event.number))

    def synchronize(self) -> None:
        """Note the wait."""
        self.cuda.calls.append(("drain", self.name))


class RecordedCuda:
    """The names of torch.cuda that the copier uses."""

    def __init__(self, register_code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.events = 0
        self.register_code = register_code
        self.last_error = 0
        self.training = RecordedStream(self, "training")

    def set_device(self, device: int) -> None:
        """Note it."""
        self.calls.append(("set_device", device))

    def current_stream(self, device: int) -> RecordedStream:
        """Training's."""
        return self.training

    def synchronize(self, device: int) -> None:
        """Note the wait for all of it."""
        self.calls.append(("synchronize", device))

    def Stream(self, device: int) -> RecordedStream:  # noqa: N802
        """The side stream."""
        return RecordedStream(self, "side")

    def Event(self, blocking: bool = False) -> RecordedEvent:  # noqa: N802
        """A numbered event."""
        self.events += 1
        return RecordedEvent(self, self.events)

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        """Note what runs inside."""
        self.calls.append(("enter", stream.name))
        yield
        self.calls.append(("leave", stream.name))

    def cudart(self) -> RecordedCuda:
        """The runtime."""
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """Note it; the code that the test wants."""
        self.calls.append(("register", address, nbytes, flags))
        self.last_error = self.last_error or self.register_code
        return self.register_code

    def _sleep(self, cycles: int) -> None:
        """A kernel, after which torch raises the last error of any call, as after all of them."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Note it."""
        self.calls.append(("unregister", address))
        return 0


def items(count: int) -> list[CopyItem]:
    """Copies of 4000 bytes each."""
    return [CopyItem(torch.full((1000,), float(i)), torch.zeros(1000)) for i in range(count)]


def test_copies_follow_the_training_stream_and_are_bounded() -> None:
    cuda = RecordedCuda()
    copier = CudaCopier(HERE, cuda, 4000)
    wanted = items(5)
    mark = copier.mark()
    assert copier.copy(wanted, mark, lambda: False)
    assert all(torch.equal(source, target) for source, target in wanted)
    assert cuda.calls[:3] == [
        ("record", 1, "training"),
        ("enter", "side"),
        ("stream waits", "side", 1),
    ]
    assert cuda.calls[-1] == ("drain", "side")
    in_flight = most = 0
    for call in cuda.calls[3:]:
        in_flight += {"record": 1, "wait": -1}.get(call[0], 0)
        most = max(most, in_flight)
    assert most == 3


class NotedArrivals:
    """Notes when each piece is said to be there."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self.cuda, self.pieces = cuda, list[tuple[list[int], list[int]]]()

    def read(self, targets: list[int], lengths: list[int]) -> None:
        """Note the piece among the calls of the device."""
        self.pieces.append((targets, lengths))
        self.cuda.calls.append(("there", len(self.pieces)))


def test_a_piece_is_digested_when_its_copy_has_landed_and_not_before() -> None:
    cuda = RecordedCuda()
    copier, wanted, arrivals = CudaCopier(HERE, cuda, 4000), items(5), NotedArrivals(cuda)
    assert copier.copy(wanted, copier.mark(), lambda: False, cast(Arrivals, arrivals))
    waits = [call[1] for call in cuda.calls if call[0] == "wait"]
    assert [call[0] for call in cuda.calls if call[0] in ("wait", "there")] == (
        ["wait", "there"] * len(waits)
    )
    assert len(waits) == len({*waits}) >= 5
    spans = sorted(zip(*map(chain.from_iterable, zip(*arrivals.pieces, strict=True)), strict=True))
    targets = sorted((target.data_ptr(), target.nbytes) for _, target in wanted)
    assert sum(length for _, length in spans) == sum(length for _, length in targets)
    assert {at for at, _ in targets} <= {at for at, _ in spans}


@pytest.mark.usefixtures(each_way.__name__)
def test_threads_digest_a_capture_from_a_device(tmp_path: Path) -> None:
    smp = FakeSmp(tmp_path)
    copier = CudaCopier(HERE, RecordedCuda(), 100_000, threads=3)
    state = {"w": torch.rand(300_000), "odd": torch.rand(7), "strided": torch.rand(200, 300).t()}
    manager = make_manager(smp, copier=copier)
    manager.prepare(state)
    snapshot = smp.grant(1)
    manager.save(1, state)
    smp.wait_ended()
    assert smp.arena is not None
    assert verify_shard(smp.arena.data(0), smp.sealed_records[snapshot], BLOCK) == []
    manager.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        copier.pool.submit(int)


def test_a_stop_leaves_nothing_in_flight() -> None:
    cuda = RecordedCuda()
    copier = CudaCopier(HERE, cuda, 4000)
    answers = iter([False, False, True])
    wanted = items(5)
    assert not copier.copy(wanted, copier.mark(), lambda: next(answers))
    assert cuda.calls[-1] == ("drain", "side")
    assert not wanted[2].target.any()


def test_an_error_leaves_nothing_in_flight() -> None:
    cuda = RecordedCuda()
    copier = CudaCopier(HERE, cuda, 4000)

    def fail() -> bool:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        copier.copy(items(1), copier.mark(), fail)
    assert cuda.calls[-1] == ("drain", "side")


def test_regions_are_registered_once_and_unregistered() -> None:
    cuda = RecordedCuda()
    copier = CudaCopier(HERE, cuda, 4000)
    regions = [np.zeros(8192, np.uint8), np.zeros(4096, np.uint8)]
    for region in regions:
        copier.attach(region)
    addresses = [region.ctypes.data for region in regions]
    assert cuda.calls == [("register", addresses[0], 8192, 1), ("register", addresses[1], 4096, 1)]
    cuda.calls.clear()
    copier.detach()
    assert cuda.calls == [("drain", "side"), *(("unregister", address) for address in addresses)]
    copier.detach()
    assert len(cuda.calls) == 4


def test_a_failed_registration_warns_and_is_not_undone(caplog: pytest.LogCaptureFixture) -> None:
    cuda = RecordedCuda(register_code=2)
    copier = CudaCopier(HERE, cuda, 4000)
    copier.attach(np.zeros(8192, np.uint8))
    assert "error 2" in caplog.text
    cuda._sleep(1)  # training's next kernel
    copier.detach()
    assert not any(call[0] == "unregister" for call in cuda.calls)


def test_host_tensors_are_secured_at_once() -> None:
    copier = CudaCopier(HERE, RecordedCuda(), 4000)
    wanted = items(2)
    secured = wanted[1].source.clone()
    staged = copier.stage(wanted)
    wanted[1].source.zero_()
    assert not torch.equal(secured, wanted[1].target)  # an older snapshot's, until the copy
    assert torch.equal(staged[1].source, secured) and staged[1].target is wanted[1].target


def test_large_tensors_are_cut_in_pieces() -> None:
    cuda = RecordedCuda()
    copier = CudaCopier(HERE, cuda, 1024)
    source = torch.randn(3, 1001)
    target = torch.zeros(3, 1001)
    assert copier.copy([CopyItem(source, target)], copier.mark(), lambda: False)
    assert torch.equal(source, target)
    assert sum(call[0] == "record" for call in cuda.calls) == 1 + -(-source.nbytes // 1024)


@pytest.mark.parametrize("transposed", [False, True])
def test_no_copy_goes_from_one_locked_range_into_the_next(
    monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    monkeypatch.setattr(copier_module, "RANGE_BYTES", 4096)
    copier = CudaCopier(HERE, RecordedCuda(), 1 << 20)
    moved: list[tuple[int, int]] = []

    def note(batch: Sequence[CopyItem], **_: Any) -> None:
        moved.extend((target.data_ptr(), target.nbytes) for _, target in batch)
        move(batch)

    monkeypatch.setattr(cuda_module, "move", note)
    source, small = torch.randn(64, 100), torch.randn(7)
    source = source.t() if transposed else source
    targets = [torch.zeros(source.shape), torch.zeros(7)]
    wanted = [CopyItem(source, targets[0]), CopyItem(small, targets[1])]
    assert copier.copy(wanted, copier.mark(), lambda: False)
    assert torch.equal(targets[0], source) and torch.equal(targets[1], small)
    assert all(start // 4096 == (start + size - 1) // 4096 for start, size in moved)
    assert len(moved) >= source.nbytes // 4096


@pytest.mark.parametrize("address", [0, 4096, RANGE_BYTES - 4096, RANGE_BYTES])
@pytest.mark.parametrize("length", [4096, RANGE_BYTES, 3 * RANGE_BYTES + 4096])
def test_ranges_follow_each_other_and_end_at_edges(address: int, length: int) -> None:
    found = list(ranges(address, length))
    starts, stops = zip(*found, strict=True)
    assert starts[0] == 0 and stops[-1] == length and starts[1:] == stops[:-1]
    assert all((address + stop) % RANGE_BYTES == 0 for stop in stops[:-1])
    assert all(0 < stop - start <= RANGE_BYTES for start, stop in found)


def one(kind: type[torch.Tensor]) -> list[CopyItem]:
    return [CopyItem(torch.ones(10).as_subclass(kind), torch.zeros(10))]


def test_a_tensor_of_another_device_is_refused() -> None:
    """Its copy would run on that device's own stream, for which nobody waits."""
    copier = CudaCopier(HERE, RecordedCuda(), 4000)
    for begin in (copier.stage, lambda items: copier.copy(items, copier.mark(), lambda: False)):
        begin(one(OnDevice))
        wanted = one(Elsewhere)
        with pytest.raises(ValueError, match="is on cuda:3 now, not cuda:2"):
            begin(wanted)
        assert not wanted[0].target.any()


def test_host_tensors_that_the_device_may_write_to_are_awaited() -> None:
    cuda = RecordedCuda()
    copier = CudaCopier(HERE, cuda, 4000)
    copier.stage(one(Pinned))
    assert cuda.calls == [("drain", "training")]
    mark = copier.mark()
    copier.copy(one(Pinned), mark, lambda: False)
    assert cuda.calls[2] == ("wait", mark.number)
    for kind in (torch.Tensor, OnDevice):
        cuda.calls.clear()
        copier.stage(one(kind))
        assert not cuda.calls
        copier.copy(one(kind), mark, lambda: False)
        assert ("wait", mark.number) not in cuda.calls


@pytest.mark.parametrize("name", ["conj", "_neg_view"])
def test_lazy_signs_are_settled_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would settle them in the target, before the bytes have arrived there."""
    moved: list[CopyItem] = []
    monkeypatch.setattr(cuda_module, "move", lambda batch, non_blocking: moved.extend(batch))
    lazy = getattr(torch.randn(9, dtype=torch.complex64), name)()
    copier = CudaCopier(HERE, RecordedCuda(), 4000)
    copier.copy([CopyItem(lazy, torch.zeros_like(lazy))], copier.mark(), lambda: False)
    (item,) = moved
    assert torch.equal(item.source, lazy)
    assert not item.source.is_conj() and not item.source.is_neg()


def test_what_is_recorded_here_is_what_torch_has() -> None:
    """One of the names is torch's own, and could go."""
    used = ("_sleep", "cudart", "current_stream", "Event", "set_device", "Stream", "stream")
    assert all(callable(getattr(torch.cuda, name)) for name in used)
    assert all(callable(getattr(RecordedCuda, name)) for name in used)
