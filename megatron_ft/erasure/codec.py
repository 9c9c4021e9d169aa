"""The arithmetic of a stripe row: k data symbols to m parities, and lost symbols back.

A codec hands out *kernels*: functions that compute some symbols of a row from k
others, in place.  Every kernel is one multiplication by a small matrix over GF(2^8),
so that XOR and whole copies are the same code with a matrix of ones.  Reed-Solomon
uses ISA-L's Cauchy matrix, of which every square part is invertible, so any m
symbols may be missing; its Vandermonde matrix is safe for few (k, m) only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from megatron_ft.core import isal
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from megatron_ft.core.isal import Bytes

Kernel = Callable[[Sequence[Bytes], Sequence[Bytes]], None]
"""``kernel(sources, outputs)``: all buffers have one length, any below 2 GiB."""


class Codec(Protocol):
    """Interface of a code, as encode and rebuild use it.

    Symbols of a row are numbered 0 to k-1 for data and k to k+m-1 for parities.
    """

    @property
    def data_members(self) -> int:
        """k."""
        ...

    @property
    def parity_members(self) -> int:
        """m."""
        ...

    def kernel(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel:
        """Compute the ``wanted`` symbols from the k ``given`` ones, in these orders."""
        ...


@dataclass(frozen=True)
class IsalCodec:
    """Any scheme in place through ISA-L, with the GIL released."""

    kind: str
    data_members: int
    parity_members: int

    def kernel(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel:
        """See Codec."""
        library = isal.load()
        tables = library.tables(self.coefficients(wanted, given))
        return lambda sources, outputs: library.encode(tables, sources, outputs)

    def coefficients(self, wanted: Sequence[int], given: Sequence[int]) -> Bytes:
        """The matrix of shape (wanted, given) that a kernel multiplies by."""
        assert len(given) == self.data_members, "a row is solved from exactly k symbols"
        library, generator = isal.load(), self.generator()
        inverse = library.inverse(generator[list(given)])
        result = np.zeros((len(wanted), len(given)), np.uint8)
        for out, symbol in enumerate(wanted):
            for column in range(len(given)):
                for inner in range(len(given)):
                    result[out, column] ^= library.multiply(
                        int(generator[symbol, inner]), int(inverse[inner, column])
                    )
        return result

    def generator(self) -> Bytes:
        """All symbols from the data: identity on top of the parity coefficients."""
        members = self.data_members + self.parity_members
        if self.kind == "rs":
            return isal.load().cauchy_matrix(members, self.data_members)
        matrix = np.eye(members, self.data_members, dtype=np.uint8)
        matrix[self.data_members :] = 1
        return matrix


@dataclass(frozen=True)
class NumpyXorCodec:
    """XOR and whole copies without ISA-L: in both, a wanted symbol is a XOR of given ones."""

    data_members: int
    parity_members: int

    def kernel(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel:
        """See Codec.

        With one parity every missing symbol is the XOR of all k others; with one data
        symbol all symbols are equal, which is the XOR of the one given.
        """
        same = [given.index(symbol) if symbol in given else None for symbol in wanted]

        def compute(sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> None:
            for place, output in zip(same, outputs, strict=True):
                chosen = sources if place is None else sources[place : place + 1]
                np.copyto(output, chosen[0])
                for source in chosen[1:]:
                    np.bitwise_xor(output, source, out=output)

        return compute


class PyEClibDriver(Protocol):
    """The two calls of ``pyeclib.ec_iface.ECDriver`` that we use; fragments carry a header."""

    def encode(self, data: bytes) -> list[bytes]:
        """All k + m fragments of the data."""
        ...

    def reconstruct(self, fragments: list[bytes], missing: list[int]) -> list[bytes]:
        """The missing fragments."""
        ...


class PyEClibCodec:
    """Reed-Solomon through PyECLib's public calls: portable, bit-identical, slow.

    It copies everything and holds the GIL, so it serves only where ISA-L itself cannot
    be called.  A PyECLib fragment is our symbol behind a header that states its number
    and length; headers are taken from an encoding of zeros of the same length.
    """

    ALIGNMENT = 32

    def __init__(self, data_members: int, parity_members: int) -> None:
        """MissingEnvironmentError if PyECLib or its ISA-L backend is not installed."""
        self.data_members, self.parity_members = data_members, parity_members
        try:
            make = import_module("pyeclib.ec_iface").ECDriver
            driver = make(k=data_members, m=parity_members, ec_type="isa_l_rs_cauchy")
        except Exception as error:  # its own errors share no importable root
            raise MissingEnvironmentError(
                "Reed-Solomon needs ISA-L, through the pyeclib wheel or your system's libisal2: "
                f"{error}"
            ) from error
        self._driver = cast(PyEClibDriver, driver)

    def kernel(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel:
        """See Codec."""

        def compute(sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> None:
            length = sources[0].nbytes
            padded = -(-length // self.ALIGNMENT) * self.ALIGNMENT
            if not length:
                return
            symbols = {n: _padded(s, padded) for n, s in zip(given, sources, strict=True)}
            solved = self._solve(symbols, padded)
            for symbol, output in zip(wanted, outputs, strict=True):
                output[:] = np.frombuffer(solved[symbol], np.uint8)[:length]

        return compute

    def _solve(self, symbols: dict[int, bytes], length: int) -> dict[int, bytes]:
        members = self.data_members + self.parity_members
        blank = self._driver.encode(bytes(length * self.data_members))
        header = len(blank[0]) - length
        missing = [n for n in range(members) if n not in symbols]
        given = [blank[n][:header] + symbol for n, symbol in symbols.items()]
        found = self._driver.reconstruct(given, missing) if missing else []
        return symbols | {n: f[header:] for n, f in zip(missing, found, strict=True)}


def open_codec(kind: str, data_members: int, parity_members: int) -> Codec:
    """The fastest codec for the scheme that can run here; all give identical parity.

    ConfigError for a kind without parity or unknown, MissingEnvironmentError if
    Reed-Solomon is wanted and neither ISA-L nor PyECLib is there.
    """
    if kind not in ("xor", "rs", "replica") or data_members < 1 or parity_members < 1:
        raise ConfigError(f"there is no codec {kind!r} with {data_members}+{parity_members}")
    if isal.available():
        return IsalCodec(kind, data_members, parity_members)
    if kind == "rs":
        return PyEClibCodec(data_members, parity_members)
    return NumpyXorCodec(data_members, parity_members)


def _padded(symbol: Bytes, length: int) -> bytes:
    return symbol.tobytes().ljust(length, b"\0")
