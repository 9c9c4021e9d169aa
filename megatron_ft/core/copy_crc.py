"""Copies and their CRC-64/XZ in one pass over memory: the functions of copy_crc.c, through ctypes.

Optional: where no C compiler was at hand when the package was installed, or the processor has no
carry-less product, numpy copies and ISA-L digests behind it, with the same bits.  Buffers are
contiguous; ctypes releases the GIL during every call.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

WITHOUT = "MEGATRON_FT_PLAIN_COPIES"
"""The environment variable that, set to 1, leaves these functions out."""

BUILT = "_copy_crc*.so"
NOT_BUILT = "copy_crc.c was not compiled when megatron-ft was installed"


class Parts:
    """Copies as the library takes them: addresses of targets and sources, and lengths.

    Source 0 stands for zeros; one that is its own target is digested and not copied.
    ``first`` and ``end`` enclose all targets.
    """

    def __init__(self, targets: Any, sources: Any, lengths: Any) -> None:
        """Of three sequences; copies of no length are left out."""
        columns = np.array([targets, sources, lengths], np.uint64)
        self.rows: Words = np.ascontiguousarray(columns[:, columns[2] != 0].T)
        self.address, self.count = self.rows.ctypes.data, len(self.rows)
        self.first, self.end = 0, 0
        if self.count:
            starts, ends = self.rows[:, 0], self.rows[:, 0] + self.rows[:, 2]
            self.first, self.end = int(starts.min()), int(ends.max())


class CopyCrc:
    """The loaded library; ``width`` is that of its products in bits: 128, 256 or 512."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        """AttributeError if the file lacks one of the functions."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.path, self.width = path, 64 << library.copy_crc_level()
        self._blocks = _typed(library.copy_crc_blocks, pointer, pointer, size, size, pointer)
        self._parts = _typed(library.copy_crc_parts, pointer, size, pointer, size, pointer, pointer)
        self._stream = _typed(library.copy_crc_stream, pointer, size)
        self._verified = _typed(
            library.copy_crc_verified, pointer, size, size, pointer, pointer, pointer, pointer
        )
        self._verified.restype = size

    def blocks(self, source: Bytes, target: Bytes | None, block_bytes: int, out: Words) -> None:
        """The CRC of each block of ``source`` into ``out``; the last block may be short.

        Copied to ``target``, if there is one, and through the caches: for a reader that follows.
        """
        assert out.size == -(-source.nbytes // block_bytes) and out.flags.c_contiguous
        assert target is None or target.nbytes == source.nbytes
        to = None if target is None else address_of(target)
        self._blocks(address_of(source), to, source.nbytes, block_bytes, address_of(out))

    def parts(self, parts: Parts, region: int, block_bytes: int, raw: int, got: int) -> None:
        """Make copies into whole blocks of a region; the last four words are addresses but one.

        Adds to ``raw``, for each block, the CRCs without inversion, and to ``got`` the number of
        bytes.  Several threads may call it at once, with any order of parts.
        """
        self._parts(parts.address, parts.count, region, block_bytes, raw, got)

    def verified(
        self, source: Bytes, block_bytes: int, expected: Words, parts: Words, ends: Words
    ) -> list[int]:
        """Verify blocks, and make copies out of those that have the ``expected`` digests.

        ``parts`` are rows of addresses of target and source, and lengths, in the order of blocks;
        ``ends`` says how many belong to each block and those before it.  No byte of a block is
        copied before the block was found right.  Returns the numbers of those that are wrong.
        """
        wrong = np.zeros(expected.size, np.uint64)
        assert expected.size == ends.size == -(-source.nbytes // block_bytes)
        found = self._verified(
            *(address_of(source), source.nbytes, block_bytes, address_of(expected)),
            *(address_of(parts), address_of(ends), address_of(wrong)),
        )
        return [int(number) for number in wrong[:found]]

    def stream(self, parts: Parts) -> None:
        """Make copies past the caches, without digests."""
        self._stream(parts.address, parts.count)


def load() -> CopyCrc | None:
    """The library, or None where it cannot be used: ``find`` has the reason."""
    found = find()
    return found if isinstance(found, CopyCrc) else None


@lru_cache(maxsize=1)
def find() -> CopyCrc | str:
    """The library, or the reason why copies and digests are two passes here."""
    if os.environ.get(WITHOUT) == "1":
        return f"{WITHOUT} is set"
    built = sorted(Path(__file__).parent.glob(BUILT))
    if not built:
        return NOT_BUILT
    try:
        library = ctypes.CDLL(str(built[0]))
        if not library.copy_crc_level():
            return f"this {platform.machine()} processor has no PCLMULQDQ"
        return CopyCrc(library, str(built[0]))
    except (OSError, AttributeError) as error:  # built for another machine, or half of it
        return f"{built[0]} cannot be loaded: {error}"


def describe() -> str:
    """A sentence on whether copies and digests are one pass here."""
    found = find()
    if isinstance(found, CopyCrc):
        return f"CPU bytes are copied and digested in one pass (products of {found.width} bits)"
    return f"CPU bytes are copied and digested in two passes: {found}"


def advice() -> str:
    """Advice on getting one pass here; empty where there is one, or cannot be one."""
    if find() != NOT_BUILT:
        return ""
    return "install a C compiler and megatron-ft again, or a wheel that was built with one"


def _typed(function: Any, *arguments: Any) -> Any:
    """A foreign function with its C types set, so that 64-bit pointers are not cut."""
    function.restype, function.argtypes = None, list(arguments)
    return function


def address_of(buffer: npt.NDArray[Any]) -> int:
    """The address of a contiguous array."""
    assert buffer.flags.c_contiguous, "contiguous buffers are needed"
    return buffer.ctypes.data
