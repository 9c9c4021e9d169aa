"""Copies of tensors in host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

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
)


class PlainCopy(NamedTuple):
    """A tensor, and its bytes and those of its target as arrays; ``copy_all`` copies them."""

    source: torch.Tensor
    address: int
    source_bytes: Bytes
    target_bytes: Bytes

    @classmethod
    def of(cls, target: torch.Tensor, source: torch.Tensor) -> PlainCopy:
        """Make one of two plain tensors of equal length; the target must stay where it is."""
        address, length = source.data_ptr(), source.nbytes
        target_bytes = bytes_at(target.data_ptr(), length)
        return cls(source, address, bytes_at(address, length), target_bytes)


def copy_all(copies: Sequence[PlainCopy]) -> None:
    """Copy all bytes of each tensor in one call, in this thread, without the GIL.

    The loop is numpy's ``positive`` of unsigned bytes, which leaves every bit as it is.  libc's
    memmove takes an instruction for it that some processors repeat slowly (``rep movsb``), and
    torch's copy_ shares large tensors among intra-op threads.
    ValueError if a source lies elsewhere by now: its old memory may have been given back.  What is
    read is kept: after a fence that gave up, training may give it back meanwhile.
    """
    if not copies:
        return
    place, memory = torch.Tensor.data_ptr, torch.Tensor.untyped_storage
    sources, addresses, froms, tos = zip(*copies, strict=True)
    # In one call, between whose steps no other thread runs.
    kept = list(zip(map(memory, sources), map(place, sources), strict=True))
    if [address for _, address in kept] != list(addresses):
        raise ValueError("a tensor was given other memory while it was copied")
    # No bytecode between the calls: other threads wait while this one holds the GIL.
    deque(map(np.positive, froms, tos), 0)


def copy_large(target: int, source: int, length: int) -> None:
    """As copy_all, once, from address to address."""
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

    def copy(self, items: Sequence[CopyItem], mark: None, should_stop: ShouldStop) -> bool:
        """Copy piece by piece; see Copier."""
        with torch.no_grad():
            for piece in self._planned(items):
                if should_stop():
                    return False
                piece.move()
                reach("capture.piece")
        return True

    def _planned(self, items: Sequence[CopyItem]) -> Iterable[SerialBatch]:
        if not isinstance(items, CopyList):
            return map(SerialBatch.of, batches(items, self._piece_bytes))
        if items.plan is None:
            items.plan = [SerialBatch.of(batch) for batch in batches(items, self._piece_bytes)]
        plan: list[SerialBatch] = items.plan
        return plan

    def after(self, mark: None) -> AbstractContextManager[None]:
        """A context that does nothing: there is no device."""
        return nullcontext()

    def enter_thread(self) -> None:
        """Do nothing; the class says which settings are avoided."""

    def detach(self) -> None:
        """Do nothing: there is nothing to undo."""


class SerialBatch(NamedTuple):
    """Copies that one thread makes without intra-op threads, strided large tensors excepted."""

    plain: list[PlainCopy]
    others: list[CopyItem]

    @classmethod
    def of(cls, batch: Iterable[CopyItem]) -> SerialBatch:
        """Sort copies by how they are made."""
        plain, others = [], []
        for item in batch:
            source, target = item
            if source.numel() >= SERIAL_ELEMENTS and all(map(is_plain_memory, item)):
                plain.append(PlainCopy.of(target, source))
            else:
                others.append(item)
        return cls(plain, others)

    def move(self) -> None:
        """Copy; the targets must be alive.  What is read is kept meanwhile, as in copy_all."""
        copy_all(self.plain)
        if self.others:
            kept = [source.untyped_storage() for source, _ in self.others]
            move(self.others)
            del kept


def move_serially(batch: Iterable[CopyItem]) -> None:
    """Copy a batch once."""
    together, lazy = list[CopyItem](), list[CopyItem]()
    for item in batch:
        (lazy if has_lazy_sign(item.target) else together).append(item)
    SerialBatch.of(together).move()
    # torch writes to what is negated or conjugated by a bit one by one only.
    for source, target in lazy:
        target.copy_(source)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes are its values, in order, in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not has_lazy_sign(tensor)
