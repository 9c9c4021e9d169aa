"""Huge pages for arenas on any tmpfs, whatever it was mounted with.

A copy into pages of 4 KiB spends much of its time on looking them up, and mapping them takes as
long as the copy.  From Linux 6.1 on a process may ask for its own memory to be put into huge
pages (MADV_COLLAPSE, madvise(2)), on a tmpfs too, unless the administrator denied those to all.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

from megatron_ft.arena import libc

log = logging.getLogger(__name__)

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


@lru_cache(maxsize=1)
def huge_page_bytes() -> int:
    """Bytes of a huge page, which is one entry of the kernel's tables; 1 where there are none."""
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 1


def allocate(descriptor: int, length: int) -> bool:
    """Give a new file, all of it holes, huge pages as far as its length and the kernel allow.

    For files that nobody else has open or mapped yet.  Whether all could be had; what could not
    is left a hole, apart from a small page here and there: nothing is lost by it.
    """
    unit = huge_page_bytes()
    whole = length // unit * unit if unit > 1 else 0
    if not whole:
        return False
    try:
        # A huge page is made of what is there: of a hole, none is.  Not by a store, which on a
        # full file system is a SIGBUS.
        for at in range(0, whole, unit):
            os.pwrite(descriptor, b"\0", at)
        pages = libc.map_file(descriptor, 0, whole, writable=True, unit=unit)
        libc.madvise(libc.address_of(pages), whole, libc.MADV_COLLAPSE)
    except OSError as error:
        log.info("no huge pages for an arena of %d bytes: %s", length, error.strerror)
        return False
    return True
