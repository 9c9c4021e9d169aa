"""Copies of many pieces of memory in few calls: threads wait for the GIL between calls."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import libc

FEW = 4
"""So many pieces at a time are copied one by one: the kernel's copy is slower on pages of 4 KiB."""

Numbers = NDArray[np.int64]


class Pieces:
    """Where pieces of memory are, where they go to, and how long they are.

    Who makes it keeps both sides mapped.
    """

    def __init__(self, targets: Numbers, sources: Numbers, lengths: Numbers) -> None:
        """All three have one number for each piece: addresses, and bytes."""
        self._into = np.stack([targets, lengths], axis=1)
        self._out_of = np.stack([sources, lengths], axis=1)
        self._tables = self._into.ctypes.data, self._out_of.ctypes.data
        self._ends: list[int] = [0, *np.cumsum(lengths).tolist()]

    def copy(self, first: int, stop: int) -> None:
        """Copy the pieces from ``first`` to before ``stop``."""
        for at in range(first, stop, libc.MOST_PIECES):
            self._copy(at, min(at + libc.MOST_PIECES, stop))

    def _copy(self, first: int, stop: int) -> None:
        if stop - first <= FEW or not self._copy_at_once(first, stop):
            self._copy_one_by_one(first, stop)

    def _copy_at_once(self, first: int, stop: int) -> bool:
        """False where the kernel denies it, as in some containers, or has broken it off."""
        into, out_of = self._tables
        at = first * libc.PIECE_BYTES
        copied = libc.copy_pieces(into + at, out_of + at, stop - first)
        return copied == self._ends[stop] - self._ends[first]

    def _copy_one_by_one(self, first: int, stop: int) -> None:
        lengths = self._into[first:stop, 1].tolist()
        targets, sources = (side[first:stop, 0].tolist() for side in (self._into, self._out_of))
        for target, source, length in zip(targets, sources, lengths, strict=True):
            ctypes.memmove(target, source, length)
