"""Shared mappings of file ranges, made sure to have their pages, in huge pages where possible.

Python's mmap lacks chosen addresses and some advice, and holds the GIL, so libc is called.  A copy
into pages of 4 KiB spends much of its time on looking them up, and mapping them takes as long as
the copy.  From Linux 6.1 on a process may ask for its own memory to be put into huge pages
(MADV_COLLAPSE, madvise(2)), on any tmpfs, unless the administrator denied those to all.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ft.core.errors import ArenaMemoryError, ArenaTruncatedError

# Linux 5.14 and 6.1; Python names the first two from 3.14 on.
MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 22, 23, 25

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0

MappedBytes = ctypes.Array[ctypes.c_ubyte]


def map_file(
    descriptor: int, offset: int, length: int, *, writable: bool, unit: int
) -> MappedBytes:
    """Map a range of a file, shared; it stays mapped while this array or a view of it lives.

    The address is to ``unit`` what ``offset`` is to it, which is how a page of ``unit`` bytes of
    the file can be one page of memory.  ``offset`` is a multiple of mmap's granularity.  OSError
    as of mmap(2).
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _room(offset, length, unit)
    fixed = _MAP_FIXED if address else 0
    at = _mmap(address, length, protection, mmap.MAP_SHARED | fixed, descriptor, offset)
    array = (ctypes.c_ubyte * length).from_address(at)
    # Not at exit: threads may be copying then, and the kernel unmaps by itself.
    weakref.finalize(array, _libc().munmap, at, length).atexit = False
    return array


def madvise(address: int, length: int, advice: int) -> None:
    """Advise on memory from a page's start on; OSError as of madvise(2)."""
    while _libc().madvise(address, length, advice):
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _room(offset: int, length: int, unit: int) -> int | None:
    """Reserve an aligned range for a mapping; returns its address, None if any will do."""
    if length < unit:
        return None
    pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _mmap(None, pages + unit, _PROT_NONE, flags, -1, 0)
    before = (offset - start) % unit
    if before:
        _libc().munmap(start, before)
    _libc().munmap(start + before + pages, unit - before)
    return start + before


def _mmap(
    address: int | None, length: int, protection: int, flags: int, descriptor: int, offset: int
) -> int:
    at: int = _libc().mmap(address, length, protection, flags, descriptor, offset)
    if at == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return at


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = pointer
    library.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    library.munmap.argtypes = [pointer, size]
    library.madvise.argtypes = [pointer, size, number]
    return library


log = logging.getLogger(__name__)

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


@lru_cache(maxsize=1)
def huge_page_bytes() -> int:
    """Bytes of a huge page, which is one entry of the kernel's tables; 1 where there are none."""
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 1


def allocate(descriptor: int, start: int, stop: int) -> bool:
    """Give holes of a file huge pages as far as this range and the kernel allow; no byte changes.

    Whether all could be had; what could not is left a hole, apart from a small page here and
    there: nothing is lost by it.
    """
    unit = huge_page_bytes()
    first, whole = -(-start // unit) * unit, stop // unit * unit
    if unit == 1 or first >= whole:
        return False
    try:
        # A huge page is made of what is there: of a hole, none is.  Not by a store, which on a
        # full file system is a SIGBUS, and might hit what another process has written.
        for at in range(first, whole, unit):
            os.posix_fallocate(descriptor, at, 1)
        pages = map_file(descriptor, first, whole - first, writable=True, unit=unit)
        madvise(ctypes.addressof(pages), whole - first, MADV_COLLAPSE)
    except OSError as error:
        log.info("no huge pages for %d bytes of an arena: %s", stop - start, error.strerror)
        return False
    return True


_Scalar = TypeVar("_Scalar", bound=np.generic)


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
            mapped = map_file(fd, start, length + self._skip, writable=writable, unit=unit)
        except OSError as error:
            raise ArenaMemoryError(f"{name} cannot be mapped: {error.strerror}") from error
        self._address, self._length = ctypes.addressof(mapped), len(mapped)
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

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Make every page of a part exist and be mapped; ArenaMemoryError instead of a later
        SIGBUS."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        last = self._length if stop is None else stop
        try:
            madvise(self._address + first, last - first, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return self._touch(first, last)
            raise ArenaMemoryError(
                f"pages could not be populated ({error.strerror}): the machine is out of memory"
            ) from error

    def release(self) -> None:
        """Give the pages back: they are holes of the file, and read as zeros.  OSError if not."""
        madvise(self._address, self._length, mmap.MADV_REMOVE)

    def _touch(self, first: int, last: int) -> None:
        # Storing a byte's own value: the page is made, its content stays.
        pages = np.frombuffer(self._mapped, np.uint8)[first : last : mmap.PAGESIZE]
        pages |= np.uint8(0)

    @property
    def _mapped(self) -> memoryview:
        if self._bytes is None:
            raise ValueError("the mapping is closed")
        return self._bytes

    def close(self) -> None:
        """Unmap now, or when the last view dies if there are any."""
        self._bytes = None
