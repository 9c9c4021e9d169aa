"""The arithmetic of parity on one core, against memcpy of the same data and PyECLib's API.

Columns lie as an encoder's pieces do, beside each other and not at one place of their pages.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.rounds import ratios, seconds
from benchmarks.table import Row
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.codec import open_codec
from megatron_ft.erasure.rows import buffers_apart

PIECE = 1 << 20
"""Bytes of each symbol in one call, as encoders use them."""

TURNS = 3
"""Turns of a round against PyECLib: each takes milliseconds."""

FREED = 24 << 20
"""Bytes; glibc looks at nothing larger than 32 MiB."""


def rows(mib: int, rounds: int) -> Iterator[Row]:
    """Encode and decode of common schemes; ``mib`` of data in each round."""
    for kind, k, m in (("xor", 3, 1), ("rs", 3, 1), ("rs", 8, 2)):
        yield from _rows(kind, k, m, mib, rounds)
    yield _against_pyeclib(rounds)


def _rows(kind: str, k: int, m: int, mib: int, rounds: int) -> Iterator[Row]:
    data, parity, out = _columns(k, m, mib)
    codec = open_codec(kind, k, m)
    encode = codec.encode_kernel()
    samples = ratios(
        rounds, _memcpy(data), lambda: seconds(lambda: _by_pieces(encode, data, parity))
    )
    yield Row(f"encode {kind}:{k}+{m}, one core", samples, "x memcpy", 1.3, note="of its data")
    lost = list(range(m))
    given = [*range(m, k + m)]
    decode = codec.kernel(lost, given)
    symbols = [*data, *parity]
    sources = [symbols[n] for n in given]
    samples = ratios(
        rounds, _memcpy(data), lambda: seconds(lambda: _by_pieces(decode, sources, out))
    )
    assert all(np.array_equal(o, data[n]) for n, o in zip(lost, out, strict=True)), "wrong bytes"
    yield Row(f"decode {m} lost of {kind}:{k}+{m}, one core", samples, "x memcpy", 1.3)


def _columns(k: int, m: int, mib: int) -> tuple[list[Bytes], list[Bytes], list[Bytes]]:
    """Random data, and room for its parity and for m decoded columns."""
    length = (mib << 20) // k // PIECE * PIECE
    columns, random = buffers_apart(k + 2 * m, length), np.random.default_rng(1)
    for column in columns:
        column[:] = random.integers(0, 256, length, dtype=np.uint8)
    return columns[:k], columns[k : k + m], columns[k + m :]


def _by_pieces(
    kernel: Callable[[list[Bytes], list[Bytes]], None], sources: list[Bytes], outputs: list[Bytes]
) -> None:
    for at in range(0, sources[0].size, PIECE):
        end = at + PIECE
        kernel([s[at:end] for s in sources], [o[at:end] for o in outputs])


def _memcpy(data: list[Bytes]) -> Callable[[], object]:
    targets = buffers_apart(len(data), data[0].size)

    def copy() -> None:
        for target, source in zip(targets, data, strict=True):
            ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)

    return copy


def _against_pyeclib(rounds: int) -> Row:
    """Processor seconds of PyECLib's own encode, over ours, for the same data."""
    from pyeclib.ec_iface import ECDriver

    k, m, size = 8, 2, 8 << 20
    driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
    _keep_freed_memory()
    blob = np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8).tobytes()
    data, parity, _ = _columns(k, m, 8)
    kernel = open_codec("rs", k, m).encode_kernel()
    found = []
    for _ in range(TURNS * rounds):
        theirs = _processor_seconds(lambda: driver.encode(blob))
        found.append(theirs / _processor_seconds(lambda: _by_pieces(kernel, data, parity)))
    note = "processor seconds of encode(bytes), in memory that was used before, over ours"
    return Row("encode rs:8+2 against PyECLib's API", tuple(found), "x", 3.0, note=note)


def _keep_freed_memory() -> None:
    """Have malloc give fragments memory of earlier ones, as in a process that has run for a while.

    glibc gives back to the kernel what is larger than anything freed before; with new pages for
    every fragment PyECLib takes seven times as long.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(libc.malloc(FREED))


def _processor_seconds(work: Callable[[], object], repeat: int = 8) -> float:
    started = time.process_time()
    for _ in range(repeat):
        work()
    return time.process_time() - started
