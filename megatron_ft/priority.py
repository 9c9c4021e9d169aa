"""Leaving processor and disk to training."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

NICENESS = 10


def lower_priority() -> None:
    """Lower this process's CPU and I/O priority; what cannot be lowered stays as it is."""
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(ImportError, OSError, AttributeError):
        psutil = import_module("psutil")
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
