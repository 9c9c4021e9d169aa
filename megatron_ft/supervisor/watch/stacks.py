"""Reading what faulthandler wrote: where the main thread is, and whether it waits for others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) ", re.MULTILINE)

_LIBRARY = re.compile(r"/torch/|/megatron_ft/|<frozen |/lib/python3[^/]*/(?!(site|dist)-packages/)")
"""PyTorch, Python's own library, and us: a place in them says less than who called it."""

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/megatron/core/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/deepspeed/comm/",
)
"""Where a rank waits for others; some wait in C++ called from there."""

_BACKWARD = "_engine_run_backward"
"""The backward pass is C++: DDP exchanges gradients in it, and Python shows only this."""


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.function} ({self.file}:{self.line})"


def main_thread(text: str) -> list[Frame]:
    """Frames of the main thread, innermost first; none if it is not there.

    faulthandler lists the newest thread first, so the main thread comes last (Python's
    documentation, ``faulthandler``).  The kernel gives a signal to the main thread if that
    can take it, so that one is called the current thread as a rule.
    """
    starts = [match.start() for match in _THREAD.finditer(text)]
    if not starts:
        return []
    matches = (_FRAME.match(line) for line in text[starts[-1] :].splitlines())
    return [Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m]


def waits_for_others(frames: Sequence[Frame]) -> bool | None:
    """Whether the thread is in a collective; None where the stack cannot tell.

    It can be in one, or compute, in the midst of a backward pass.
    """
    if not frames:
        return None
    if any(part in frames[0].file for part in _COLLECTIVE_FILES):
        return True
    return None if frames[0].function == _BACKWARD else False


def of_training(frames: Sequence[Frame]) -> list[Frame]:
    """The frames that are no library's; all if there is no other."""
    return [frame for frame in frames if not _LIBRARY.search(frame.file)] or list(frames)
