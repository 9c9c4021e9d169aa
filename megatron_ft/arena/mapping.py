"""Shared mappings of file ranges, and making sure that their pages exist."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ft.errors import ArenaMemoryError, ArenaTruncatedError

_Scalar = TypeVar("_Scalar", bound=np.generic)

# Linux 5.14; Python names them from 3.14 on.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
# mmap.madvise holds the GIL: small pieces let heartbeats of the same process through.
_POPULATE_PIECE = 16 << 20


def populate_read(view: NDArray[np.uint8]) -> bool:
    """Map the pages under a view now, so that whoever reads it next takes no faults.

    The GIL is not held meanwhile.  False where the kernel cannot: nothing is lost by it.
    """
    start, end = view.ctypes.data, view.ctypes.data + view.nbytes
    first = start - start % mmap.PAGESIZE
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return end == start or call(first, end - first, _MADV_POPULATE_READ) == 0


class Mapping:
    """One shared mapping of ``length`` bytes at ``offset`` of an open file.

    Views keep the memory mapped after ``close``: it is unmapped when the last of
    them dies, never under them.
    """

    def __init__(self, fd: int, offset: int, length: int, *, writable: bool, name: str) -> None:
        # Kernels with 64 KiB pages cannot map at every 4096-byte offset.
        self._skip = offset % mmap.ALLOCATIONGRANULARITY
        self._length = length
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = mmap.mmap(
                fd, length + self._skip, mmap.MAP_SHARED, protection, offset=offset - self._skip
            )
        except ValueError as error:
            raise ArenaTruncatedError(f"{name} became shorter while it was opened") from error
        except OSError as error:
            raise ArenaMemoryError(f"{name} cannot be mapped: {error.strerror}") from error

    def read(self, offset: int, length: int) -> bytes:
        """A copy of bytes, ``offset`` counted from the mapping's start."""
        at = self._skip + offset
        return self._map[at : at + length]

    def write(self, offset: int, raw: bytes) -> None:
        """Store bytes; the mapping must be writable."""
        at = self._skip + offset
        self._map[at : at + len(raw)] = raw

    def view(self, dtype: type[_Scalar], offset: int, count: int) -> NDArray[_Scalar]:
        """An array over the mapping's own bytes, read-only where the mapping is."""
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=self._skip + offset)

    def populate(self) -> None:
        """Make every page exist and be mapped; ArenaMemoryError instead of a later SIGBUS."""
        for at in range(0, len(self._map), _POPULATE_PIECE):
            self._populate(at, min(_POPULATE_PIECE, len(self._map) - at))

    def _populate(self, at: int, length: int) -> None:
        while True:
            try:
                return self._map.madvise(_MADV_POPULATE_WRITE, at, length)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return self._touch(at, length)
                raise ArenaMemoryError(
                    f"pages could not be populated ({error.strerror}): the machine is out of memory"
                ) from error

    def _touch(self, at: int, length: int) -> None:
        # Storing a byte's own value: the page is made, its content stays.
        pages = np.frombuffer(self._map, np.uint8, length, at)[:: mmap.PAGESIZE]
        pages |= np.uint8(0)

    def close(self) -> None:
        """Unmap now, or when the last view dies if there are any."""
        try:
            self._map.close()
        except BufferError:
            # Views exist; each holds the map object, whose own end unmaps.
            pass
