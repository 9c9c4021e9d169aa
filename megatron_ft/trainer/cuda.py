"""Copies of tensors in device memory, on a stream of their own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import Any

import torch

from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.core.cores import MOST_DIGEST_THREADS, own_cores
from megatron_ft.core.fault_points import reach
from megatron_ft.trainer.copier import (
    PIECE_BYTES,
    Bytes,
    CopyItem,
    ShouldStop,
    batches,
    move,
    note,
    ranges,
)

logger = logging.getLogger(__name__)

PORTABLE = 1
"""Flag of cudaHostRegister: pinned in every context of the process."""

PIECES_IN_FLIGHT = 2
"""One piece is copied while the next is queued; more would only delay a stop."""

_DEVICE, _HOST = methodcaller("get_device"), -1


class CudaCopier:
    """Asynchronous device-to-host copies into pinned arena memory, from one device.

    The arena's data regions are page-locked once, range by range.  Each copy runs on a side stream
    that first waits for an event of the training stream, so it sees the state as of
    the iteration boundary.  ``cuda`` is torch.cuda, or something with the same names.
    Never fork a process that has pinned memory; start children with exec.
    """

    def __init__(
        self, device: int, cuda: Any = None, piece_bytes: int = PIECE_BYTES, threads: int = 0
    ) -> None:
        """Copies are cut in pieces of ``piece_bytes`` bytes; ``device`` is its number.

        So many ``threads`` digest, each piece when it is there; 0: by the machine.
        """
        self.pool = ThreadPoolExecutor(
            threads or min(MOST_DIGEST_THREADS, own_cores()), "megatron-ft-digest"
        )
        self._cuda = torch.cuda if cuda is None else cuda
        self._piece_bytes = piece_bytes
        self._device = device
        self._stream = self._cuda.Stream(device=self._device)
        self._pinned: list[int] = []

    def attach(self, region: Bytes) -> None:
        """Page-lock the region; where that fails copies continue unpinned, which is slower.

        Regions begin on pages of their own, so no page is registered twice.
        """
        address = region.ctypes.data
        code = int(self._cuda.cudart().cudaHostRegister(address, region.nbytes, PORTABLE))
        if code == 0:
            self._pinned.append(address)
            return
        logger.warning(
            "cudaHostRegister of %d bytes failed with CUDA error %d: copies run unpinned and "
            "slower; raise the limit of locked memory (ulimit -l)",
            region.nbytes,
            code,
        )
        self._forget_error()

    def _forget_error(self) -> None:
        """Take back the error of a call that failed: torch raises it after its next kernel."""
        with suppress(RuntimeError):
            self._cuda._sleep(1)

    def stage(self, items: Sequence[CopyItem]) -> list[CopyItem]:
        """Clone on the device, in order with training's own work, and host tensors there.

        A clone costs memory for a moment but no wait: the copy out of it is lazy.  The slot may
        hold an older snapshot until the copy begins.
        """
        self._prepare(items, self._cuda.current_stream(self._device).synchronize)
        with torch.no_grad():
            return [CopyItem(source.detach().clone(), target) for source, target in items]

    def mark(self) -> Any:
        """An event on the training thread's current stream."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def copy(
        self,
        items: Sequence[CopyItem],
        mark: Any,
        should_stop: ShouldStop,
        arrivals: Arrivals | None = None,
    ) -> bool:
        """Copy piece by piece on the side stream; see Copier."""
        self._prepare(items, mark.synchronize)
        in_flight: deque[tuple[Any, list[CopyItem]]] = deque()

        def land() -> None:
            done, batch = in_flight.popleft()
            done.synchronize()
            if arrivals is not None:
                note(arrivals, batch)

        try:
            with torch.no_grad(), self._cuda.stream(self._stream):
                self._stream.wait_event(mark)
                for batch in batches(_in_ranges(items), self._piece_bytes):
                    if should_stop():
                        return False
                    in_flight.append((self._start(batch), batch))
                    reach("capture.piece")
                    if len(in_flight) > PIECES_IN_FLIGHT:
                        land()
                while arrivals is not None and in_flight:
                    land()
                return True
        finally:
            # Queued copies write to the slot whatever happens here: wait for all of them.
            self._stream.synchronize()

    def _prepare(self, items: Sequence[CopyItem], wait: Callable[[], None]) -> None:
        """``wait`` for what the device may still write to pinned host tensors, if there are any.

        ValueError for a tensor of another device: its copies would run on no stream of ours.
        """
        devices = {*map(_DEVICE, sources := [source for source, _ in items])}
        if elsewhere := devices - {_HOST, self._device}:
            raise ValueError(f"a tensor is on cuda:{min(elsewhere)} now, not cuda:{self._device}")
        if _HOST in devices and any(s.is_pinned() for s in sources if not s.is_cuda):
            wait()

    def _start(self, batch: Sequence[CopyItem]) -> Any:
        # torch negates what a lazy bit says on the host at once, before the bytes are there.
        plain = [CopyItem(s.resolve_conj().resolve_neg(), target) for s, target in batch]
        move(plain, non_blocking=True)
        done = self._cuda.Event(blocking=True)
        done.record(self._stream)
        return done

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """A context on the side stream; host tensors have arrived in it, too."""
        mark.synchronize()
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def enter_thread(self) -> None:
        """Select the device: the selection belongs to the thread, the default is device 0."""
        self._cuda.set_device(self._device)

    def detach(self) -> None:
        """Unlock the regions, while the context lives and before they are unmapped."""
        self._stream.synchronize()
        self.pool.shutdown()
        for address in self._pinned:
            self._cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()


def _in_ranges(items: Iterable[CopyItem]) -> Iterator[CopyItem]:
    """The items, cut where a target goes from one range into the next.

    Each range is page-locked by itself, and CUDA copies into one of them at a time.
    """
    for source, target in items:
        cuts = list(ranges(target.data_ptr(), target.nbytes))
        if len(cuts) == 1:
            yield CopyItem(source, target)
            continue
        size = target.element_size()
        flat_source, flat_target = source.contiguous().view(-1), target.view(-1)
        for start, stop in cuts:
            part = slice(start // size, stop // size)
            yield CopyItem(flat_source[part], flat_target[part])
