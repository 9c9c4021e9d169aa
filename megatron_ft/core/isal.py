"""The few functions of Intel's ISA-L that we need, called in place through ctypes.

ISA-L is found in the pyeclib wheel, which bundles it, or as a system library.
Buffers are contiguous numpy uint8 arrays; nothing is copied, and ctypes releases
the GIL during every call, so a training thread is never held up by a coder.

The library is looked for on first use only: importing this module never fails.
Facts from ISA-L's headers ``erasure_code.h`` and ``crc64.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.core.errors import MissingEnvironmentError

Bytes = npt.NDArray[np.uint8]

_SYSTEM_NAME = "libisal.so.2"
_TABLE_BYTES = 32
"""Bytes that ``ec_init_tables`` writes for each coefficient."""


class IsaL:
    """One loaded library; ``path`` says which file it is."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        """Take what we need; AttributeError if the release lacks one of the functions."""
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.path = path
        self._crc64 = _typed(
            library.crc64_ecma_refl,
            ctypes.c_uint64,
            ctypes.c_uint64,
            pointer,
            ctypes.c_uint64,
        )
        self._init = _typed(library.ec_init_tables, None, number, number, pointer, pointer)
        self._encode = _typed(
            library.ec_encode_data, None, number, number, number, pointer, pointer, pointer
        )
        self._cauchy = _typed(library.gf_gen_cauchy1_matrix, None, pointer, number, number)
        self._invert = _typed(library.gf_invert_matrix, number, pointer, pointer, number)
        self._mul = _typed(library.gf_mul, ctypes.c_ubyte, ctypes.c_ubyte, ctypes.c_ubyte)

    def crc64(self, buffer: Bytes, before: int = 0) -> int:
        """CRC-64 with the ECMA-182 polynomial, reflected (CRC-64/XZ), resuming from another's."""
        return int(self._crc64(before, _address(buffer), buffer.nbytes))

    def crc64_blocks(self, buffer: Bytes, block_bytes: int, out: npt.NDArray[np.uint64]) -> None:
        """``crc64`` of each block into ``out``; the last block may be short.

        The address is asked for once: for a block of 64 KiB that costs half as much as its CRC.
        """
        start, length, crc64 = _address(buffer), buffer.nbytes, self._crc64
        whole = length // block_bytes
        for number in range(whole):
            out[number] = crc64(0, start + number * block_bytes, block_bytes)
        for number in range(whole, out.size):
            at = number * block_bytes
            out[number] = crc64(0, start + at, length - at)

    def cauchy_matrix(self, rows: int, columns: int) -> Bytes:
        """Generator of shape (rows, columns): identity on top, Cauchy parity rows below."""
        matrix = np.zeros((rows, columns), np.uint8)
        self._cauchy(_address(matrix), rows, columns)
        return matrix

    def inverse(self, matrix: Bytes) -> Bytes:
        """Inverse of a square matrix over GF(2^8); ValueError if it is singular."""
        work = np.array(matrix, np.uint8, order="C")
        result = np.zeros_like(work)
        if self._invert(_address(work), _address(result), len(work)):
            raise ValueError(f"the matrix of shape {work.shape} is singular over GF(2^8)")
        return result

    def multiply(self, left: int, right: int) -> int:
        """Product of two elements of GF(2^8), polynomial x^8+x^4+x^3+x^2+1."""
        return int(self._mul(left, right))

    def tables(self, coefficients: Bytes) -> Bytes:
        """Tables that ``encode`` needs for coefficients of shape (outputs, sources)."""
        rows = np.ascontiguousarray(coefficients, np.uint8)
        outputs, sources = rows.shape
        tables = np.empty(_TABLE_BYTES * outputs * sources, np.uint8)
        self._init(sources, outputs, _address(rows), _address(tables))
        return tables

    def encode(self, tables: Bytes, sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> None:
        """Outputs = coefficients x sources, byte by byte; all buffers have one length.

        Any length and alignment below 2 GiB will do; outputs must not overlap sources.
        """
        length = sources[0].nbytes
        assert all(b.nbytes == length for b in (*sources, *outputs)), "buffers differ in length"
        assert tables.nbytes == _TABLE_BYTES * len(sources) * len(outputs), "tables do not fit"
        self._encode(
            length,
            len(sources),
            len(outputs),
            _address(tables),
            _addresses(sources),
            _addresses(outputs),
        )


@lru_cache(maxsize=1)
def load() -> IsaL:
    """The library; MissingEnvironmentError, which says what to install, if there is none."""
    tried = candidates()
    for path in tried:
        try:
            return IsaL(ctypes.CDLL(path), path)
        except (OSError, AttributeError):  # absent, or a release without what we need
            continue
    raise MissingEnvironmentError(
        f"ISA-L was not found (tried {', '.join(tried)}): install the pyeclib wheel, which "
        "bundles it, or your system's libisal2"
    )


def crc64(buffer: Bytes) -> int:
    """CRC-64/XZ of a contiguous buffer, faster than memcpy."""
    return load().crc64(buffer)


def candidates() -> list[str]:
    """Places to look for the library, best first.

    The wheel's file name carries a suffix that differs between builds, hence the pattern.
    """
    spec = find_spec("pyeclib")
    places = list(spec.submodule_search_locations or ()) if spec else []
    bundled = [
        str(path)
        for place in places
        for path in sorted(Path(place).parent.glob("pyeclib.libs/libisal*"))
    ]
    return [*bundled, _SYSTEM_NAME]


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    """A foreign function with its C types set, so that 64-bit pointers are not cut."""
    function.restype, function.argtypes = result, list(arguments)
    return function


def _address(buffer: Bytes) -> int:
    assert buffer.flags.c_contiguous, "ISA-L needs contiguous buffers"
    return buffer.ctypes.data


def _addresses(buffers: Sequence[Bytes]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(*(_address(b) for b in buffers))
