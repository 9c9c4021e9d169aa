"""Copies of tensors in host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch

from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.core import copy_crc
from megatron_ft.core.copy_crc import Parts
from megatron_ft.core.fault_points import reach
from megatron_ft.trainer.addresses import has_lazy_sign
from megatron_ft.trainer.copier import (
    PIECE_BYTES,
    Bytes,
    CopyItem,
    CopyList,
    ShouldStop,
    batches,
    move,
    note,
)


def copy_large(target: int, source: int, length: int) -> None:
    """Copy without the GIL and without other threads, from address to address."""
    np.positive(bytes_at(source, length), out=bytes_at(target, length))


def bytes_at(address: int, length: int) -> Bytes:
    """Memory as an array, which does not keep it alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(address)), np.uint8)


SERIAL_ELEMENTS = 32768
"""torch copies tensors of fewer elements in the calling thread (at::internal::GRAIN_SIZE)."""


class CpuCopier:
    """Copies with one thread, the one that calls it, and without the GIL.

    More threads were not used on purpose: intra-op threads that compete with training
    made copies two to five times slower, and one thread reaches memory speed mostly.  Nor is
    torch.set_num_threads: it moves process-wide defaults, and with them the last bits of
    training's sums.  Large contiguous tensors are copied as bytes instead.
    """

    pool: Executor | None = None

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        """Copies are cut in pieces of ``piece_bytes`` bytes."""
        self._piece_bytes = piece_bytes

    def attach(self, region: Bytes) -> None:
        """Do nothing: any mapped memory is a target."""

    def stage(self, items: Sequence[CopyItem]) -> list[CopyItem]:
        """Clone at once: the slot may hold an older snapshot until the copy begins."""
        with torch.no_grad():
            return [CopyItem(source.detach().clone(), target) for source, target in items]

    def mark(self) -> None:
        """Work on the CPU is done when the call returns, so there is no point to remember."""

    def copy(
        self,
        items: Sequence[CopyItem],
        mark: None,
        should_stop: ShouldStop,
        arrivals: Arrivals | None = None,
    ) -> bool:
        """Copy piece by piece; see Copier."""
        with torch.no_grad():
            for piece in self._planned(items):
                if should_stop():
                    return False
                piece.move(arrivals)
                reach("capture.piece")
        return True

    def _planned(self, items: Sequence[CopyItem]) -> Iterable[SerialBatch]:
        if not isinstance(items, CopyList):
            return map(SerialBatch, batches(items, self._piece_bytes))
        if items.plan is None:
            items.plan = [SerialBatch(batch) for batch in batches(items, self._piece_bytes)]
        plan: list[SerialBatch] = items.plan
        return plan

    def after(self, mark: None) -> AbstractContextManager[None]:
        """A context that does nothing: there is no device."""
        return nullcontext()

    def enter_thread(self) -> None:
        """Do nothing; the class says which settings are avoided."""

    def detach(self) -> None:
        """Do nothing: there is nothing to undo."""


class SerialBatch:
    """Copies that one thread makes without intra-op threads, strided large tensors excepted."""

    def __init__(self, batch: Iterable[CopyItem], serial_elements: int = SERIAL_ELEMENTS) -> None:
        """Sort copies by how they are made; targets must stay where they are.

        Plain tensors are copied as bytes, the small ones only by our own library: numpy takes
        longer to begin.
        """
        self._library = copy_crc.load()
        least = serial_elements if self._library is None else 1
        self._sources, self._others = list[torch.Tensor](), list[CopyItem]()
        self._addresses, self._targets, self._lengths = list[int](), list[int](), list[int]()
        for item in batch:
            source, target = item
            alike = source.dtype == target.dtype and source.shape == target.shape
            if alike and source.numel() >= least and all(map(is_plain_memory, item)):
                self._sources.append(source)
                self._addresses.append(source.data_ptr())
                self._targets.append(target.data_ptr())
                self._lengths.append(source.nbytes)
            else:
                self._others.append(item)
        self._parts = Parts(self._targets, self._addresses, self._lengths)

    @cached_property
    def _arrays(self) -> tuple[list[Bytes], list[Bytes]]:
        froms, tos = (
            [*map(bytes_at, addresses, self._lengths)]
            for addresses in (self._addresses, self._targets)
        )
        return froms, tos

    def move(self, arrivals: Arrivals | None = None) -> None:
        """Copy without the GIL; ``arrivals`` digests what is copied as bytes while it passes.

        Without our own library, the loop is numpy's ``positive`` of unsigned bytes, which leaves
        every bit as it is.  libc's memmove takes an instruction for it that some processors repeat
        slowly (``rep movsb``), and torch's copy_ shares large tensors among intra-op threads.
        ValueError if a source lies elsewhere by now: its old memory may have been given back.  What
        is read is kept: after a fence that gave up, training may give it back meanwhile.
        The targets must be alive.
        """
        place, memory = torch.Tensor.data_ptr, torch.Tensor.untyped_storage
        # In one call, between whose steps no other thread runs.
        kept = list(zip(map(memory, self._sources), map(place, self._sources), strict=True))
        if [address for _, address in kept] != self._addresses:
            raise ValueError("a tensor was given other memory while it was copied")
        if arrivals is not None:
            arrivals.copy(self._parts)
        elif self._library is not None:
            self._library.stream(self._parts)
        elif self._sources:
            # No bytecode between the calls: other threads wait while this one holds the GIL.
            deque(map(np.positive, *self._arrays), 0)
        if self._others:
            more = [source.untyped_storage() for source, _ in self._others]
            move(self._others)
            del more
            if arrivals is not None:
                note(arrivals, self._others)
        del kept


def move_serially(batch: Iterable[CopyItem]) -> None:
    """Copy a batch once."""
    together, lazy = list[CopyItem](), list[CopyItem]()
    for item in batch:
        (lazy if has_lazy_sign(item.target) else together).append(item)
    SerialBatch(together).move()
    # torch writes to what is negated or conjugated by a bit one by one only.
    for source, target in lazy:
        target.copy_(source)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes are its values, in order, in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not has_lazy_sign(tensor)
