"""Copies of tensors in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from megatron_ft.trainer.addresses import has_lazy_sign
from megatron_ft.trainer.copier import (
    Bytes,
    CopyItem,
    CopyList,
    batches,
    move,
)
from megatron_ft.trainer.plain_copy import PlainCopy, copy_all
from megatron_ft.trainer.shared_pieces import SharedPieces, ShouldStop

SERIAL_ELEMENTS = 32768
"""torch copies tensors of fewer elements in the calling thread (at::internal::GRAIN_SIZE)."""


class CpuCopier:
    """Copies with one thread, the one that calls it, and without the GIL; a training thread that
    waits for the copy is a second one.

    More threads were not used on purpose: intra-op threads that compete with training
    made copies two to five times slower, and one thread reaches memory speed mostly.  Nor is
    torch.set_num_threads: it moves process-wide defaults, and with them the last bits of
    training's sums.  Large contiguous tensors are copied as bytes instead.
    """

    def __init__(self, piece_bytes: int) -> None:
        """Copies are cut in pieces of ``piece_bytes`` bytes."""
        self._piece_bytes = piece_bytes

    def attach(self, regions: Sequence[Bytes]) -> None:
        """Nothing to do: any mapped memory is a target."""

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
        shared: SharedPieces,
    ) -> bool:
        """Copy piece by piece; see Copier."""
        with torch.no_grad():
            return shared.copy(self._planned(items), should_stop)

    def _planned(self, items: Sequence[CopyItem]) -> Iterable[SerialBatch]:
        if not isinstance(items, CopyList):
            return map(SerialBatch.of, batches(items, self._piece_bytes))
        if items.plan is None:
            items.plan = [SerialBatch.of(batch) for batch in batches(items, self._piece_bytes)]
        plan: list[SerialBatch] = items.plan
        return plan

    def enter_thread(self) -> None:
        """Nothing to set: see the class for what is not."""

    def detach(self) -> None:
        """Nothing to undo."""


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
                plain.append(PlainCopy(target, source))
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
    """Whether the tensor's bytes are its values, in order, in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not has_lazy_sign(tensor)
