"""The page in a node's folder that says until when background traffic keeps still.

One 64-bit float for each of 512 trainers, in seconds of CLOCK_MONOTONIC, which all processes of
a machine share: no message, no wait, and nobody who must be alive for a window to end.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.core import private_files

FILE_NAME = "quiet"
SLOTS = 512
PAGE_BYTES = 8 * SLOTS

MOST_SECONDS = 10.0
"""No window may end later from now; a word that says so is damaged and counts for nothing."""


class QuietWord:
    """The mapped page: trainers write their own slots, others read."""

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        """Map it; OSError if it is not there, and nobody wants it made.

        UntrustedFileError if it is not this user's.
        """
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = private_files.open_file(directory / FILE_NAME, flags)
        try:
            if create:
                os.ftruncate(descriptor, PAGE_BYTES)
                # Not a hole, which would be a SIGBUS on a full tmpfs.
                os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._map = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._until: NDArray[np.float64] = np.frombuffer(self._map, np.float64)

    def begin(self, slot: int, until: float) -> None:
        """Trainer ``slot`` of this node is in a window that ends at ``until`` at the latest."""
        self._until[slot % SLOTS] = until

    def end(self, slot: int) -> None:
        """Its window is over."""
        self._until[slot % SLOTS] = 0.0

    def remaining(self, now: float | None = None) -> float:
        """Seconds until no trainer is in a window any more, 0 if none is."""
        left = self._until - (time.monotonic() if now is None else now)
        return float(max(0.0, left[left <= MOST_SECONDS].max(initial=0.0)))


def open_word(directory: Path) -> QuietWord | None:
    """The page of a node; None where no SMP has made one."""
    try:
        return QuietWord(directory)
    except (OSError, ValueError):
        return None
