"""CRCs of runs of blocks, from the CRCs of the blocks: nothing is read for them.

A CRC of A and B together is the CRC of A, moved on by as many zeros as B has bytes, plus (xor) the
CRC of B, where both begin with and are inverted at the end by ones, as CRC-64/XZ is.  Moving on is
linear over GF(2), so 64 single bits tell all of it; they are moved on by the CRC's own code.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_ft import isal

Table = NDArray[np.uint64]
_BYTES = np.arange(256)


def joined_crcs(crcs: Table, block_bytes: int, run: int) -> Table:
    """CRC-64/XZ of each whole run of ``run`` neighbours, all of whose blocks have one length.

    Pairs are joined as long as they come out even, which is the fewest steps.
    """
    runs = crcs[: crcs.size // run * run].reshape(-1, run)
    while run % 2 == 0:
        runs = _moved_on(runs[:, ::2], block_bytes) ^ runs[:, 1::2]
        run, block_bytes = run // 2, block_bytes * 2
    joined: Table = runs[:, 0].copy()
    for number in range(1, run):
        joined = _moved_on(joined, block_bytes) ^ runs[:, number]
    return joined


def _moved_on(crcs: Table, block_bytes: int) -> Table:
    # Lowest byte first, as in the table.
    bytes_of = np.ascontiguousarray(crcs, "<u8").view(np.uint8).reshape(-1, 8)
    moved = np.zeros(crcs.shape, np.uint64)
    for at, images in enumerate(_images(block_bytes)):
        moved ^= images.take(bytes_of[:, at])
    return moved


@lru_cache(maxsize=16)
def _images(block_bytes: int) -> list[Table]:
    """For each of a CRC's bytes, lowest first, what each of its values becomes."""
    zeros, library = np.zeros(block_bytes, np.uint8), isal.load()
    nothing = library.crc64(zeros)
    bits = [np.uint64(library.crc64(zeros, 1 << bit) ^ nothing) for bit in range(64)]
    return [_of_byte(bits[at : at + 8]) for at in range(0, 64, 8)]


def _of_byte(bits: list[np.uint64]) -> Table:
    images = np.zeros(256, np.uint64)
    for number, image in enumerate(bits):
        images ^= np.where(_BYTES >> number & 1, image, np.uint64(0))
    return images
