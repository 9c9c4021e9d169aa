"""The rank that a stuck job waits for, decided from marks, states and stacks.  Pure.

Stacks are what faulthandler wrote: they show where the main thread is, and whether it waits for
others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) ", re.MULTILINE)

_LIBRARY = re.compile(r"/torch/|/megatron_ft/|<frozen |/lib/python3[^/]*/(?!(site|dist)-packages/)")
"""PyTorch, Python's own library, and us: a place in them shows less than its caller."""

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
    """True if the thread is in a collective; None where the stack does not show it.

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


SUSPENDED = frozenset("Tt")
"""The kernel's letters for a process that was stopped by a signal or a debugger (proc(5))."""

DISK_SLEEP = "D"


@dataclass(frozen=True)
class Witness:
    """The evidence of one rank of a stuck job.

    ``marks`` are those since its incarnation began; ``place`` is where its main thread is, empty if
    not known, and ``calls`` the functions that lead there, outermost first; ``waits`` is whether
    that is in a collective, None if the stack cannot tell.
    """

    rank: int
    marks: int
    state: str
    place: str = ""
    calls: tuple[str, ...] = ()
    waits: bool | None = None

    @classmethod
    def of(cls, rank: int, marks: int, state: str, stacks: str) -> Witness:
        """With what its stacks tell."""
        frames = main_thread(stacks)
        own = of_training(frames)
        calls = tuple(frame.function for frame in reversed(own))
        waits = waits_for_others(frames)
        return cls(rank, marks, state, str(own[0]) if own else "", calls, waits)


class Blame(NamedTuple):
    """The ranks that the others wait for, and how that is known."""

    ranks: tuple[int, ...]
    reason: str


def blame(witnesses: Sequence[Witness]) -> Blame:
    """The stuck ranks among all; all of them if nothing tells them apart.

    In order of certainty: a process that is suspended; ranks that passed the fewest marks;
    among those, ranks whose main thread is not in a collective; ranks that have left the way of
    the others.
    """
    assert witnesses
    suspended = [w for w in witnesses if w.state in SUSPENDED]
    if suspended:
        return _blame(suspended, "its process is suspended (SIGSTOP or a debugger)")
    fewest = min(w.marks for w in witnesses)
    behind = [w for w in witnesses if w.marks == fewest]
    if len(behind) == 1:
        return _blame(behind, "it is behind all others" + _detail(behind[0]))
    working = [w for w in behind if w.waits is False]
    if working and len(working) < len(behind):
        return _blame(working, "it is in no collective" + _detail(working[0]))
    apart = [w for w in _apart(witnesses) if w in behind]
    if apart:
        return _blame(apart, "it has left the way of the others")
    if len(behind) < len(witnesses):
        return _blame(behind, "they are behind the others")
    return _blame(behind, "nothing tells the ranks apart")


def _blame(ranks: Sequence[Witness], reason: str) -> Blame:
    return Blame(tuple(sorted(w.rank for w in ranks)), reason)


def _detail(witness: Witness) -> str:
    return ", in the kernel, perhaps on a disk" if witness.state == DISK_SLEEP else ""


def _apart(witnesses: Sequence[Witness]) -> list[Witness]:
    """The ranks that are not with most others where the calls leading to all of them part."""
    for depth in range(max(len(w.calls) for w in witnesses)):
        here = Counter(w.calls[: depth + 1] for w in witnesses)
        common, count = here.most_common(1)[0]
        if len(here) > 1:
            others = [w for w in witnesses if w.calls[: depth + 1] != common]
            return others if 2 * count > len(witnesses) else []
    return []
