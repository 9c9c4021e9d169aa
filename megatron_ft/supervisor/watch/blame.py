"""Which rank a stuck job waits for: decided from marks, states and stacks.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.supervisor.watch.stacks import main_thread, of_training, waits_for_others

SUSPENDED = frozenset("Tt")
"""The kernel's letters for a process that was stopped by a signal or a debugger (proc(5))."""

DISK_SLEEP = "D"


@dataclass(frozen=True)
class Witness:
    """What is known of one rank of a stuck job.

    ``marks`` are those since its life began; ``place`` is where its main thread is, empty if
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
    """Those not with most ranks where the calls that lead to all of them part, if there is such."""
    for depth in range(max(len(w.calls) for w in witnesses)):
        here = Counter(w.calls[: depth + 1] for w in witnesses)
        common, count = here.most_common(1)[0]
        if len(here) > 1:
            others = [w for w in witnesses if w.calls[: depth + 1] != common]
            return others if 2 * count > len(witnesses) else []
    return []
