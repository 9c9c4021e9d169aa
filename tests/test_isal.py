"""ISA-L through ctypes against published values and arithmetic written out by hand."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft import isal
from megatron_ft.errors import MissingEnvironmentError

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
    isal._load.cache_clear()
    monkeypatch.setattr(isal, "candidates", lambda: ["/nowhere/libisal.so"])
    try:
        assert not isal.available()
        with pytest.raises(MissingEnvironmentError, match="/nowhere/libisal.so.*pyeclib"):
            isal.crc64(np.zeros(1, np.uint8))
    finally:
        isal._load.cache_clear()


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
