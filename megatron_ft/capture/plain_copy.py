"""The bytes of one tensor, copied to one place again and again."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from megatron_ft.capture.copier import Bytes


class PlainCopy:
    """Copies all bytes of a tensor in one call, in this thread, without the GIL.

    The loop is numpy's ``positive`` of unsigned bytes, which leaves every bit as it is.  libc's
    memmove takes an instruction for it that some processors repeat slowly (``rep movsb``), and
    torch's copy_ shares large tensors among intra-op threads.
    Where the source lies is asked at every copy, so that memory that it has given back is not read.
    """

    __slots__ = ("_address", "_bytes", "_source", "_target")

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Both are plain memory of as many bytes; the target must stay where it is."""
        self._target = bytes_at(target.data_ptr(), source.nbytes)
        self._source = source
        self._address, self._bytes = 0, self._target[:0]

    def __call__(self) -> None:
        """Copy."""
        address = self._source.data_ptr()
        if address != self._address:
            self._bytes, self._address = bytes_at(address, self._source.nbytes), address
        np.positive(self._bytes, out=self._target)


def copy_large(target: int, source: int, length: int) -> None:
    """As PlainCopy, once, from address to address."""
    np.positive(bytes_at(source, length), out=bytes_at(target, length))


def bytes_at(address: int, length: int) -> Bytes:
    """Memory as an array, which does not keep it alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(address)), np.uint8)
