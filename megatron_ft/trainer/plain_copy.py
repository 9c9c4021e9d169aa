"""The bytes of tensors, copied to the same places again and again."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from megatron_ft.trainer.copier import Bytes

_SOURCE, _TARGET = attrgetter("source_bytes"), attrgetter("target_bytes")


class PlainCopy:
    """A tensor and where its bytes go; ``copy_all`` copies them."""

    __slots__ = ("address", "source", "source_bytes", "target_bytes")

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Both are plain memory of as many bytes; the target must stay where it is."""
        self.target_bytes = bytes_at(target.data_ptr(), source.nbytes)
        self.source = source
        self.address, self.source_bytes = 0, self.target_bytes[:0]

    def look(self, address: int) -> None:
        """The source lies there now."""
        self.source_bytes, self.address = bytes_at(address, self.source.nbytes), address


def copy_all(copies: Sequence[PlainCopy]) -> None:
    """Copy all bytes of each tensor in one call, in this thread, without the GIL.

    The loop is numpy's ``positive`` of unsigned bytes, which leaves every bit as it is.  libc's
    memmove takes an instruction for it that some processors repeat slowly (``rep movsb``), and
    torch's copy_ shares large tensors among intra-op threads.
    Where a source lies is asked at every copy, so that memory that it has given back is not read,
    and what is read is kept: after a fence that gave up, training may give it back meanwhile.
    """
    place, memory = torch.Tensor.data_ptr, torch.Tensor.untyped_storage
    sources = [copy.source for copy in copies]
    # In one call, between whose steps no other thread runs.
    kept = list(zip(map(memory, sources), map(place, sources), strict=True))
    for copy, (_, address) in zip(copies, kept, strict=True):
        if address != copy.address:
            copy.look(address)
    # No bytecode between the calls: other threads wait while this one holds the GIL.
    deque(map(np.positive, map(_SOURCE, copies), map(_TARGET, copies)), 0)


def copy_large(target: int, source: int, length: int) -> None:
    """As copy_all, once, from address to address."""
    np.positive(bytes_at(source, length), out=bytes_at(target, length))


def bytes_at(address: int, length: int) -> Bytes:
    """Memory as an array, which does not keep it alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(address)), np.uint8)
