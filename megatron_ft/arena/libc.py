"""The memory calls of libc that Python's mmap lacks: chosen addresses, and no GIL held."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import lru_cache

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


def address_of(array: MappedBytes) -> int:
    """Where its first byte is."""
    return ctypes.addressof(array)


def madvise(address: int, length: int, advice: int) -> None:
    """Advise on memory from a page's start on; OSError as of madvise(2)."""
    while _libc().madvise(address, length, advice):
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _room(offset: int, length: int, unit: int) -> int | None:
    """An address for a mapping, of which the kernel holds just the room; None: any will do."""
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
