"""Leaving processor and disk to training."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress

NICENESS = 10

IDLE_CLASS = 3
"""IOPRIO_CLASS_IDLE of ioprio_set(2): the disk serves others first."""

_CLASS_SHIFT = 13
_WHO_PROCESS = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def lower_priority() -> None:
    """Lower this thread's CPU and I/O priority, and that of all that it will start.

    Called before threads exist it is the process's.  What cannot be lowered stays as it is.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        # A scheduler that knows no classes ignores it, and nothing depends on it.
        ctypes.CDLL(None).syscall(call, _WHO_PROCESS, 0, IDLE_CLASS << _CLASS_SHIFT)
