"""The cause of an encoder world's end, read from what its processes wrote last."""

from __future__ import annotations

import re

_NO_BACKING = re.compile(
    r"not enough space for (\S+)/[^/\s]+ \(the shared-memory backing file\)"
    r".*?Space Requested: (\d+) B"
)
_NO_SPACE = re.compile(r"^.*No space left on device.*$", re.MULTILINE)
_BUS_ERROR = re.compile(r"\bbus error\b", re.IGNORECASE)
_ERROR = re.compile(
    r"^(?:\[\S+\] )?(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception): .*)$", re.MULTILINE
)
_LEFT = re.compile(r"^(.*): this encoder leaves$", re.MULTILINE)
_SIGNAL = re.compile(r"exited on signal (\d+ \([\w ]+\))")


def why_ended(said: str, status: int, folder: str = "") -> str:
    """The cause in words; the same for worlds that ended alike.  Pure.

    ``said`` is what the world wrote to its log, ``status`` its exit status, ``folder`` where MPI
    keeps shared memory, empty if it keeps none.  MPI breaks its lines anywhere.
    """
    joined = " ".join(said.split())
    less = "free memory there, or start the job with --transport tcp"
    if found := _NO_BACKING.search(joined):
        needed = int(found[2]) / (1 << 20)
        where = folder or found[1]
        return f"less than {needed:.0f} MiB is free for MPI's shared memory in {where}: {less}"
    if found := _NO_SPACE.search(said):
        return f"an encoder had no room: {found[0].strip()[:300]}"
    if _BUS_ERROR.search(joined):
        where = f"the tmpfs of {folder}" if folder else "the tmpfs of the arenas"
        return f"an encoder died of a bus error, as where {where} is full: {less}"
    if found := _ERROR.search(said):
        return found[1][:300]
    if found := _LEFT.search(said):
        return found[1]
    if found := _SIGNAL.search(joined):
        return f"an encoder ended by signal {found[1]}"
    return f"ended by signal {-status}" if status < 0 else f"exit status {status}"
