"""ISA-L through ctypes against published values and arithmetic written out by hand."""

from __future__ import annotations

import ctypes
import lzma
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core import isal
from megatron_ft.core.errors import MissingEnvironmentError

bytes_of_field = st.integers(0, 255)


def multiply_by_hand(left: int, right: int) -> int:
    """Carry-less product modulo x^8 + x^4 + x^3 + x^2 + 1."""
    product = 0
    for bit in range(8):
        if right >> bit & 1:
            product ^= left << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def crc_by_hand(data: bytes) -> int:
    """CRC-64 with the ECMA-182 polynomial, reflected, bit by bit."""
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xC96C5795D7870F42 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def test_crc64_of_the_check_string() -> None:
    """The value that catalogues of CRCs give for CRC-64/XZ."""
    assert isal.crc64(np.frombuffer(b"123456789", np.uint8)) == 0x995DC9BBDF1939FA


@given(st.binary(max_size=200))
def test_crc64_equals_the_bitwise_definition(data: bytes) -> None:
    assert isal.crc64(np.frombuffer(data, np.uint8)) == crc_by_hand(data)


def crc_by_lzma(data: bytes) -> int:
    """What an .xz file holds of its content: the last 8 bytes before its index and footer."""
    file = lzma.compress(data, check=lzma.CHECK_CRC64)
    index_bytes = 4 * (1 + int.from_bytes(file[-8:-4], "little"))
    end = len(file) - 12 - index_bytes
    return int.from_bytes(file[end - 8 : end], "little")


@pytest.mark.parametrize("length", [1, 255, 256, 4097, 100_003, (1 << 20) + 17])
def test_crc64_of_long_buffers_is_that_of_another_program(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length + 3, dtype=np.uint8)[3:]
    assert isal.crc64(data) == crc_by_lzma(data.tobytes())


def own_function(name: str, needs: str) -> Any:
    """One of the library's, for processors that have ``needs``; skips where there is none."""
    functions = ctypes.CDLL(isal.load().path)
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if not hasattr(functions, name) or not set(needs.split()) <= flags:
        pytest.skip(f"no {name} here")
    return getattr(functions, name)


@pytest.mark.parametrize(
    ("name", "needs"),
    [("base", ""), ("by8", "pclmulqdq"), ("by16_10", "vpclmulqdq avx512vl avx512bw")],
)
def test_digests_are_the_same_on_all_processors(name: str, needs: str) -> None:
    crc64 = own_function(f"crc64_ecma_refl_{name}", needs)
    crc64.restype, crc64.argtypes = ctypes.c_uint64, [ctypes.c_uint64, ctypes.c_void_p]
    data = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)
    for start, stop in ((0, 100_000), (1, 3), (5, 260), (64, 64 + 65536), (7, 33_333)):
        part = data[start:stop]
        found = crc64(0, part.ctypes.data, ctypes.c_uint64(part.nbytes))
        assert found == isal.crc64(part), (start, stop)


@pytest.mark.parametrize(
    ("tables", "name", "needs"),
    [
        ("base", "base", ""),
        ("base", "sse", "sse4_1"),
        ("base", "avx", "avx"),
        ("base", "avx2", "avx2"),
        ("base", "avx512", "avx512f avx512bw avx512vl"),
        ("gfni", "avx2_gfni", "avx2 gfni"),
        ("gfni", "avx512_gfni", "avx512f avx512bw avx512vl gfni"),
    ],
)
@pytest.mark.parametrize("parities", [1, 2, 3])
def test_parity_is_the_same_on_all_processors(
    tables: str, name: str, needs: str, parities: int
) -> None:
    """Those of one stripe may differ."""
    begin, encode = (
        own_function(f"ec_init_tables_{tables}", needs),
        own_function(f"ec_encode_data_{name}", needs),
    )
    library, (k, length) = isal.load(), (5, 70_003)
    rows = library.cauchy_matrix(k + parities, k)[k:].copy()
    data = np.random.default_rng(parities).integers(0, 256, (k, length), dtype=np.uint8)
    wanted, found = np.zeros((2, parities, length), np.uint8)
    library.encode(library.tables(rows), list(data), list(wanted))
    kept = np.zeros(32 * k * parities, np.uint8)
    begin(k, parities, ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(kept.ctypes.data))
    pointers = [(ctypes.c_void_p * len(r))(*(one.ctypes.data for one in r)) for r in (data, found)]
    encode(length, k, parities, ctypes.c_void_p(kept.ctypes.data), *pointers)
    assert np.array_equal(found, wanted)


@given(bytes_of_field, bytes_of_field)
def test_products_in_the_field(left: int, right: int) -> None:
    assert isal.load().multiply(left, right) == multiply_by_hand(left, right)


@pytest.mark.parametrize("length", [0, 1, 31, 1000])
def test_encode_at_any_length_and_alignment(length: int) -> None:
    library = isal.load()
    coefficients = np.array([[1, 2, 3], [7, 0, 255]], np.uint8)
    memory = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    sources = [memory[1 + i * 1001 :][:length] for i in range(3)]
    outputs = [np.full(length + 8, 9, np.uint8) for _ in range(2)]
    library.encode(library.tables(coefficients), sources, [o[3 : 3 + length] for o in outputs])
    for row, output in zip(coefficients, outputs, strict=True):
        for at in range(length):
            wanted = 0
            for factor, source in zip(row, sources, strict=True):
                wanted ^= multiply_by_hand(int(factor), int(source[at]))
            assert output[3 + at] == wanted
        assert (output[:3] == 9).all() and (output[3 + length :] == 9).all()


def test_inverse() -> None:
    library = isal.load()
    matrix = library.cauchy_matrix(7, 4)[3:]
    inverse = library.inverse(matrix)
    for i in range(4):
        for j in range(4):
            total = 0
            for n in range(4):
                total ^= library.multiply(int(matrix[i, n]), int(inverse[n, j]))
            assert total == (i == j)
    with pytest.raises(ValueError, match="singular"):
        library.inverse(np.ones((2, 2), np.uint8))


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isal.load.cache_clear()
    monkeypatch.setattr(isal, "candidates", lambda: ["/nowhere/libisal.so"])
    try:
        with pytest.raises(MissingEnvironmentError, match="/nowhere/libisal.so.*pyeclib"):
            isal.crc64(np.zeros(1, np.uint8))
    finally:
        isal.load.cache_clear()


def test_the_gil_is_released() -> None:
    """Another thread runs while this one is inside the library."""
    buffer = np.zeros(64 << 20, np.uint8)
    inside, counted, stop = threading.Event(), [0], threading.Event()

    def count() -> None:
        inside.set()
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    inside.wait(10)
    during = 0
    for _ in range(20):
        before = counted[0]
        isal.crc64(buffer)
        during += counted[0] - before
    stop.set()
    thread.join(10)
    assert during > 1000
