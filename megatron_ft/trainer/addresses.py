"""Addresses of tensors: finds the named tensor whose memory a view shows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch

DENSE = {torch.Tensor, torch.nn.Parameter}
"""Types whose torch.strided layout means plain memory; their subclasses may do otherwise."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that lies on this rank; any other tensor as it is."""
    if type(tensor) in DENSE:
        return tensor
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else tensor


class TensorWindow(NamedTuple):
    """A view into a named tensor: ``as_strided(flat, shape, stride, offset)``, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class AddressBook:
    """Named contiguous tensors, searched by the memory that they occupy.

    The tensors must stay alive: freed memory is given out again.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tensors without elements, with gaps in memory or a lazy sign are left out."""
        spans = (
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name, tensor.dtype)
            for name, tensor in tensors.items()
            if tensor.numel() and tensor.is_contiguous() and not has_lazy_sign(tensor)
        )
        self._spans = sorted(spans, key=lambda span: (span[0], -span[1], span[2]))
        self._starts = [span[0] for span in self._spans]
        # The highest end so far: where it lies below a view, no earlier tensor can hold it.
        self._highest = list(accumulate((span[1] for span in self._spans), max))

    def find(self, view: torch.Tensor) -> TensorWindow | None:
        """The tensor that holds all of ``view``; of several the smallest, then the last by name.

        None if there is none, or if it has another dtype, or the view a lazy sign.
        """
        if has_lazy_sign(view):
            return None
        first, last = view.data_ptr(), view.data_ptr() + reach_bytes(view)
        for index in reversed(range(bisect_right(self._starts, first))):
            if self._highest[index] < last:
                break
            start, end, name, dtype = self._spans[index]
            if end >= last and dtype == view.dtype:
                offset = (first - start) // view.element_size()
                return TensorWindow(name, offset, tuple(view.shape), tuple(view.stride()))
        return None


def has_memory(tensor: torch.Tensor) -> bool:
    """True if the elements have memory: those of a storage resized to nothing have none.

    Frameworks that shard tensors free the whole ones so.  torch reads them without looking.
    """
    return tensor.layout != torch.strided or not tensor.numel() or tensor.data_ptr() != 0


def has_lazy_sign(tensor: torch.Tensor) -> bool:
    """True if the bytes are not the values: torch conjugates or negates them on reading.

    Such a view and its base have one memory and different values.
    """
    return tensor.is_conj() or tensor.is_neg()


def reach_bytes(view: torch.Tensor) -> int:
    """Bytes from the first to behind the last element of a view."""
    steps = ((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (sum(steps) + 1) * view.element_size() if view.numel() else 0
