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
from functools import lru_cache

import numpy as np

from megatron_ft.core import isal
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.isal import Bytes

Kernel = Callable[[Sequence[Bytes], Sequence[Bytes]], None]
"""``kernel(sources, outputs)``: all buffers have one length, any below 2 GiB."""


@dataclass(frozen=True)
class Codec:
    """One scheme's code, in place through ISA-L with the GIL released; see ``open_codec``.

    Symbols of a row are numbered 0 to k-1 for data and k to k+m-1 for parities.
    """

    kind: str
    data_members: int
    parity_members: int

    def kernel(
        self, wanted: Sequence[int], given: Sequence[int], *, with_sum: bool = False
    ) -> Kernel:
        """Compute the ``wanted`` symbols from the k ``given`` ones, in these orders.

        ``with_sum``: the XOR of those given is one more output, the last.
        """
        return _isal_kernel(self, tuple(wanted), tuple(given), with_sum)

    def encode_kernel(self) -> Kernel:
        """Compute all parities from all data columns."""
        data = self.data_members
        return self.kernel(range(data, data + self.parity_members), range(data))

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


@lru_cache(maxsize=512)
def _isal_kernel(
    codec: Codec, wanted: tuple[int, ...], given: tuple[int, ...], with_sum: bool
) -> Kernel:
    library, rows = isal.load(), codec.coefficients(wanted, given)
    if with_sum:
        rows = np.concatenate([rows, np.ones((1, len(given)), np.uint8)])
    tables = library.tables(rows)
    return lambda sources, outputs: library.encode(tables, sources, outputs)


def open_codec(kind: str, data_members: int, parity_members: int) -> Codec:
    """The codec of a scheme.

    ConfigError for a kind without parity or unknown, MissingEnvironmentError without ISA-L.
    """
    if kind not in ("xor", "rs", "replica") or data_members < 1 or parity_members < 1:
        raise ConfigError(f"there is no codec {kind!r} with {data_members}+{parity_members}")
    isal.load()
    return Codec(kind, data_members, parity_members)
