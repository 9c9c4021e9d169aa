"""Shared mappings of file ranges, and making sure that their pages exist."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import libc
from megatron_ft.arena.huge_pages import huge_page_bytes
from megatron_ft.core.errors import ArenaMemoryError, ArenaTruncatedError

_Scalar = TypeVar("_Scalar", bound=np.generic)


def populate_read(view: NDArray[np.uint8]) -> bool:
    """Map the pages under a view now, so that whoever reads it next takes no faults.

    The GIL is not held meanwhile.  False where the kernel cannot: nothing is lost by it.
    """
    start, end = view.ctypes.data, view.ctypes.data + view.nbytes
    first = start - start % mmap.PAGESIZE
    try:
        if end > start:
            libc.madvise(first, end - first, libc.MADV_POPULATE_READ)
    except OSError:
        return False
    return True


class Mapping:
    """One shared mapping of ``length`` bytes at ``offset`` of an open file.

    Huge pages of the file are huge pages here.  Views keep the memory mapped after ``close``:
    it is unmapped when the last of them dies, never under them.
    """

    def __init__(self, fd: int, offset: int, length: int, *, writable: bool, name: str) -> None:
        # Kernels with 64 KiB pages cannot map at every 4096-byte offset.
        self._skip = offset % mmap.ALLOCATIONGRANULARITY
        start, unit = offset - self._skip, huge_page_bytes()
        if os.fstat(fd).st_size < offset + length:
            raise ArenaTruncatedError(f"{name} became shorter while it was opened")
        try:
            mapped = libc.map_file(fd, start, length + self._skip, writable=writable, unit=unit)
        except OSError as error:
            raise ArenaMemoryError(f"{name} cannot be mapped: {error.strerror}") from error
        self._address, self._length = libc.address_of(mapped), len(mapped)
        every = memoryview(mapped).cast("B")
        self._bytes: memoryview | None = every if writable else every.toreadonly()

    def read(self, offset: int, length: int) -> bytes:
        """A copy of bytes, ``offset`` counted from the mapping's start."""
        at = self._skip + offset
        return self._mapped[at : at + length].tobytes()

    def write(self, offset: int, raw: bytes) -> None:
        """Store bytes; the mapping must be writable."""
        at = self._skip + offset
        self._mapped[at : at + len(raw)] = raw

    def view(self, dtype: type[_Scalar], offset: int, count: int) -> NDArray[_Scalar]:
        """An array over the mapping's own bytes, read-only where the mapping is."""
        return np.frombuffer(self._mapped, dtype=dtype, count=count, offset=self._skip + offset)

    def populate(self) -> None:
        """Make every page exist and be mapped; ArenaMemoryError instead of a later SIGBUS."""
        try:
            libc.madvise(self._address, self._length, libc.MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return self._touch()
            raise ArenaMemoryError(
                f"pages could not be populated ({error.strerror}): the machine is out of memory"
            ) from error

    def _touch(self) -> None:
        # Storing a byte's own value: the page is made, its content stays.
        pages = np.frombuffer(self._mapped, np.uint8)[:: mmap.PAGESIZE]
        pages |= np.uint8(0)

    @property
    def _mapped(self) -> memoryview:
        if self._bytes is None:
            raise ValueError("the mapping is closed")
        return self._bytes

    def close(self) -> None:
        """Unmap now, or when the last view dies if there are any."""
        self._bytes = None
