"""Copies of tensors in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from megatron_ft.capture.copier import Bytes, CopyItem, ShouldStop, batches, move

SERIAL_ELEMENTS = 32768
"""torch copies tensors of fewer elements in the calling thread (at::internal::GRAIN_SIZE)."""


class CpuCopier:
    """Copies with one thread, the one that calls it, and without the GIL.

    More threads were not used on purpose: intra-op threads that compete with training
    made copies two to five times slower, and one thread reaches memory speed.  Nor is
    torch.set_num_threads: it moves process-wide defaults, and with them the last bits of
    training's sums.  Large contiguous tensors go by memmove instead.
    """

    def __init__(self, piece_bytes: int) -> None:
        """Copies are cut in pieces of ``piece_bytes`` bytes."""
        self._piece_bytes = piece_bytes

    def attach(self, regions: Sequence[Bytes]) -> None:
        """Nothing to do: any mapped memory is a target."""

    def stage(self, items: Sequence[CopyItem]) -> list[CopyItem]:
        """Copy at once; nothing is left for later."""
        with torch.no_grad():
            for batch in batches(items, self._piece_bytes):
                move(batch)
        return []

    def mark(self) -> None:
        """Work on the CPU is done when the call returns, so there is no point to remember."""

    def copy(self, items: Sequence[CopyItem], mark: None, should_stop: ShouldStop) -> bool:
        """Copy piece by piece; see Copier."""
        with torch.no_grad():
            for batch in batches(items, self._piece_bytes):
                if should_stop():
                    return False
                move_serially(batch)
        return True

    def enter_thread(self) -> None:
        """Nothing to set: see the class for what is not."""

    def detach(self) -> None:
        """Nothing to undo."""


def move_serially(batch: Sequence[CopyItem]) -> None:
    """Copy a batch without intra-op threads, strided large tensors excepted."""
    small = []
    for item in batch:
        source, target = item
        plain = _is_plain_memory(source) and _is_plain_memory(target)
        if source.numel() >= SERIAL_ELEMENTS and plain:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            small.append(item)
    if small:
        move(small)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are its values, in order, in host memory."""
    lazy_bits = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy_bits
