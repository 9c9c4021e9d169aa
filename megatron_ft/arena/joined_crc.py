"""CRCs of runs of blocks, from the CRCs of the blocks: nothing is read for them.

A CRC of A and B together is the CRC of A, moved on by as many zeros as B has bytes, plus (xor) the
CRC of B, where both begin with and are inverted at the end by ones, as CRC-64/XZ is.  Moving on is
linear over GF(2), so 64 single bits tell all of it; they are moved on by the CRC's own code.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_ft.core import isal

Table = NDArray[np.uint64]


def joined_crcs(crcs: Table, block_bytes: int, run: int) -> Table:
    """CRC-64/XZ of each whole run of ``run`` neighbours, all of whose blocks have one length."""
    return _joined(crcs[: crcs.size // run * run].reshape(-1, run), block_bytes, 1)


def _joined(runs: Table, block_bytes: int, blocks: int) -> Table:
    """Of each row, whose CRCs are of ``blocks`` blocks each: by pairs, then by pairs of these."""
    if runs.shape[1] == 1:
        alone: Table = runs[:, 0].copy()
        return alone
    if runs.shape[1] % 2:
        before = _joined(runs[:, :-1], block_bytes, blocks)
        return _moved_on(before, block_bytes, blocks) ^ runs[:, -1]
    pairs = _moved_on(runs[:, ::2], block_bytes, blocks) ^ runs[:, 1::2]
    return _joined(pairs, block_bytes, 2 * blocks)


def _moved_on(crcs: Table, block_bytes: int, blocks: int) -> Table:
    """What they become when so many blocks of zeros follow; ``blocks`` is a power of two."""
    # Lowest byte first, as in the table.
    bytes_of = np.ascontiguousarray(crcs, "<u8").view(np.uint8).reshape(*crcs.shape, 8)
    moved = np.zeros(crcs.shape, np.uint64)
    for at, images in enumerate(_images(block_bytes, blocks)):
        moved ^= images.take(bytes_of[..., at])
    return moved


@lru_cache(maxsize=32)
def _images(block_bytes: int, blocks: int) -> Table:
    """For each of a CRC's bytes, lowest first, what each of its values becomes."""
    bits, images = _bits(block_bytes, blocks).reshape(8, 8), np.zeros((8, 1), np.uint64)
    for number in range(8):
        images = np.concatenate([images, images ^ bits[:, number : number + 1]], axis=1)
    return images


@lru_cache(maxsize=32)
def _bits(block_bytes: int, blocks: int) -> Table:
    """What each single bit of a CRC becomes."""
    if blocks > 1:
        return _moved_on(_bits(block_bytes, blocks // 2), block_bytes, blocks // 2)
    zeros, library = np.zeros(block_bytes, np.uint8), isal.load()
    nothing = library.crc64(zeros)
    return np.array([library.crc64(zeros, 1 << bit) ^ nothing for bit in range(64)], np.uint64)
