"""How long the parts of a trainer's start take, measured inside it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_ft.core.wrapping import Function, wrap
from megatron_ft.rpc.heartbeat_page import Pulse

_communicators = 0.0


def process_start() -> float:
    """When this process was started, in seconds of the monotonic clock; to 10 ms.

    Field 22 of /proc/self/stat counts from boot, time asleep included (proc(5)).
    """
    text = Path("/proc/self/stat").read_text()
    ticks = int(text[text.rindex(")") + 2 :].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def time_communicators() -> None:
    """Measure ``torch.distributed.init_process_group``, which has just been imported."""
    from torch.distributed import distributed_c10d

    wrap(distributed_c10d, "init_process_group", _timed)


def _timed(original: Function) -> Function:
    def init_process_group(*args: object, **kwargs: object) -> object:
        global _communicators
        began = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            _communicators += time.monotonic() - began

    return init_process_group


class StartParts:
    """Fills in a pulse as the start goes on; ``first_iteration`` is 0 until it has ended."""

    def __init__(self, pulse: Pulse, imported: float) -> None:
        """``imported`` is when the imports of the script had ended, on the monotonic clock."""
        self._pulse = pulse
        pulse.started = process_start()
        pulse.imports = max(0.0, imported - pulse.started)
        self._ready = time.monotonic()

    def restored(self, seconds: float) -> None:
        """The state was loaded, just now."""
        self._ready = time.monotonic()
        self._pulse.restore = seconds

    def first_ended(self) -> None:
        """The first iteration has ended."""
        now, pulse = time.monotonic(), self._pulse
        pulse.communicators = _communicators
        known = pulse.imports + pulse.communicators + pulse.restore
        pulse.set_up = max(0.0, self._ready - pulse.started - known)
        pulse.first_iteration = now - self._ready
